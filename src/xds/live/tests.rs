//! Lists and changes of objects, limits, and conditions.

use std::time::Duration;

use serde_json::json;
use tokio::time::advance;

use super::*;
use crate::config::Config;
use crate::status::Status;
use crate::telemetry::Metrics;

pub(super) fn service(name: &str, port: i64) -> Json {
    let metadata = json!({"name": name, "namespace": "app", "resourceVersion": "7"});
    let spec = json!({"ports": [{"port": port}], "clusterIP": "10.1.0.1"});
    json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})
}

/// Lists objects of one kind, as far as they fit.
pub(super) fn list_kind(live: &LiveSource, kind: &str, items: &[Json]) {
    live.begin(kind);
    if items.iter().all(|item| live.put(kind, item.clone(), true)) {
        live.complete(kind);
    }
}

/// Lists Services, and nothing of the other kinds.
pub(super) fn list(live: &LiveSource, services: &[Json]) {
    for (kind, _) in KINDS {
        list_kind(live, kind, if kind == "Service" { services } else { &[] });
    }
}

pub(super) fn services(count: usize) -> Vec<Json> {
    (0..count).map(|number| service(&format!("s{number}"), 80)).collect()
}

fn pod(name: &str, address: u8) -> Json {
    let status = json!({"phase": "Running", "podIPs": [{"ip": format!("10.2.0.{address}")}]});
    let metadata = json!({"name": name, "namespace": "app"});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status})
}

pub(super) fn count(live: &LiveSource) -> usize {
    live.contents().unwrap().objects.len()
}

pub(super) fn findings(live: &LiveSource) -> Vec<String> {
    live.contents().unwrap().all_findings().lines()
}

#[test]
fn there_are_no_contents_before_each_kind_was_listed() {
    let live = LiveSource::new(&KubernetesApi::default());
    let (last, others) = KINDS.split_last().unwrap();
    for (kind, _) in others {
        live.begin(kind);
        live.complete(kind);
        assert!(live.contents().is_none(), "{kind}");
    }
    assert_eq!(live.missing(), [last.0]);
    live.failed(last.0, Problem::Failed("away".to_owned()));
    assert!(live.contents().is_none());
    live.failed(last.0, Problem::Missing);
    assert_eq!(
        findings(&live),
        [format!(
            "Kubernetes: warning: the API server has no {}, and is asked again every 30 s",
            last.0
        )]
    );
}

#[test]
fn a_list_removes_objects_once_it_is_complete() {
    let live = LiveSource::new(&KubernetesApi::default());
    list(&live, &[service("a", 80), service("b", 80)]);
    live.begin("Service");
    assert!(live.put("Service", service("b", 80), true));
    live.failed("Service", Problem::Failed("away".to_owned()));
    live.failed("Pod", Problem::Failed("away".to_owned()));
    assert_eq!(live.contents().unwrap().objects.len(), 2);
    let away = "Kubernetes: error: Pod, Service cannot be watched: away; the last state stays \
                in use";
    assert_eq!(findings(&live), [away]);
    list(&live, &[service("b", 80)]);
    assert_eq!(live.contents().unwrap().objects.len(), 1);
    assert_eq!(findings(&live), [""; 0]);
    live.remove("Service", &service("b", 80));
    assert!(live.contents().unwrap().objects.is_empty());
}

#[test]
fn an_equal_object_changes_nothing() {
    let live = LiveSource::new(&KubernetesApi::default());
    list(&live, &[service("a", 80)]);
    let version = live.version();
    let mut same = service("a", 80);
    same["metadata"]["resourceVersion"] = json!("8");
    same["status"] = json!({"loadBalancer": {}});
    assert!(live.put("Service", same, false));
    list(&live, &[service("a", 80)]);
    assert_eq!(live.version(), version);
    assert!(live.put("Service", service("a", 81), false));
    assert_ne!(live.version(), version);
}

#[test]
fn an_invalid_object_is_named_with_its_field() {
    let live = LiveSource::new(&KubernetesApi::default());
    list(&live, &[service("a", 80), service("b", 0)]);
    let found = findings(&live).join("\n");
    assert!(found.starts_with("Service app/b: error: `spec.ports[].port` "), "{found}");
}

#[test]
fn a_condition_names_the_worst_that_was_found() {
    let finding = |severity, what: &str| {
        let place = Place { file: "ServiceExport app/a".into(), line: 0 };
        Finding { severity, ..Finding::warning(&place, what.to_owned(), "b") }
    };
    let warning = finding(Severity::Warning, "w");
    let refusal = finding(Severity::PassedOver, "r");
    let of = |read: &[Finding], joined: &[&Finding]| {
        let Condition { holds, reason, message } = condition::of(read, joined, &[]);
        (holds, reason, message)
    };
    let accepted = (true, "Accepted", String::new());
    assert_eq!(of(&[], &[]), accepted);
    let (w, r) = ("w; write b".to_owned(), "r; write b".to_owned());
    assert_eq!(of(std::slice::from_ref(&warning), &[]), (true, "Accepted", w.clone()));
    assert_eq!(of(&[], &[&warning]), (false, "NoEffect", w.clone()));
    assert_eq!(of(&[], &[&warning, &refusal]), (false, "Refused", format!("{w}\n{r}")));
    assert_eq!(of(&[warning.clone(), refusal], &[&warning]), (false, "Invalid", r));
    let closed = condition::of(&[], &[], &[&warning]);
    assert_eq!((closed.holds, closed.reason), (false, "PortUnavailable"));
    assert_eq!(condition::of(&[], &[&warning], &[&warning]).message, format!("{w}\n{w}"));
    let many = vec![finding(Severity::PassedOver, &"ä".repeat(20_000)); 9];
    assert_eq!(of(&many, &[]).2.chars().count(), condition::MESSAGE_MAX);
}

#[test]
fn objects_without_a_finding_keep_their_condition_if_findings_may_be_omitted() {
    let live = LiveSource::new(&KubernetesApi::default());
    let (mut export, policy) = (service("a", 80), service("b", 80));
    export["kind"] = json!("ServiceExport");
    export["apiVersion"] = json!("multicluster.x-k8s.io/v1beta1");
    let mut other = export.clone();
    other["metadata"]["name"] = json!("b");
    list(&live, &[policy]);
    assert!(live.put("ServiceExport", export, false) && live.put("ServiceExport", other, false));
    let place = Place { file: "ServiceExport app/a".into(), line: 0 };
    let found = Finding::warning(&place, "w".to_owned(), "").of("app");
    let judged = |found: &[Finding]| {
        live.judge(&live.contents().unwrap(), found, &[]);
        let verdicts = live.verdicts().borrow().clone().unwrap();
        verdicts
            .iter()
            .map(|(one, of)| (one.name.clone(), of.as_ref().map(|of| of.reason)))
            .collect::<Vec<_>>()
    };
    let first = ("app/a".to_owned(), Some("NoEffect"));
    let second = ("app/b".to_owned(), Some("Accepted"));
    assert_eq!(judged(std::slice::from_ref(&found)), [first.clone(), second]);
    let unknown = ("app/b".to_owned(), None);
    assert_eq!(judged(&vec![found; WARNINGS_MAX]), [first, unknown]);
}

#[test]
fn a_selector_of_namespaces_leaves_out_the_objects_of_others() {
    let live = selecting();
    list(&live, &[service("a", 80)]);
    let namespace = |label: &str| namespace("app", label);
    let count = || live.contents().unwrap().objects.len();
    assert_eq!(count(), 0, "no such namespace");
    assert!(live.put("Namespace", namespace("out"), false));
    assert_eq!(count(), 0);
    assert!(live.put("Namespace", namespace("in"), false));
    assert_eq!(count(), 2);
}

#[test]
fn nodes_beyond_the_limits_change_nothing_until_a_list_fits() {
    let node = |name: &str| json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}});
    let api = KubernetesApi { hold: Duration::ZERO, ..KubernetesApi::default() };
    let live = LiveSource::with_limits(&api, 2, BYTES_MAX);
    list(&live, &[]);
    list_kind(&live, "Node", &[node("a"), node("b")]);
    assert_eq!(count(&live), 2);
    assert!(!live.put("Node", node("c"), false));
    live.remove("Node", &node("a"));
    assert_eq!(count(&live), 2, "the last state");
    let found = findings(&live).remove(0);
    assert!(found.starts_with("Kubernetes: error: more than 2 objects"), "{found}");
    assert!(found.ends_with("most are Namespaces and Nodes; the last state stays in use"));
    list_kind(&live, "Node", &[node("a"), node("b"), node("c")]);
    assert_eq!(count(&live), 2, "the last state");
    list_kind(&live, "Node", &[node("c")]);
    assert_eq!(count(&live), 1);
    assert_eq!(findings(&live), [""; 0]);
    let small = LiveSource::with_limits(&KubernetesApi::default(), 2, 10);
    list(&small, &[]);
    list_kind(&small, "Node", &[node("a")]);
    assert!(small.contents().is_none());
}

#[test]
fn an_object_of_the_same_text_and_another_generation_gets_its_own_condition() {
    let live = LiveSource::new(&KubernetesApi::default());
    list(&live, &[]);
    let mut export = service("a", 80);
    export["kind"] = json!("ServiceExport");
    export["apiVersion"] = json!("multicluster.x-k8s.io/v1beta1");
    for (generation, uid) in [(1, "x"), (2, "x"), (2, "y")] {
        export["metadata"]["generation"] = json!(generation);
        export["metadata"]["uid"] = json!(uid);
        let version = live.version();
        assert!(live.put("ServiceExport", export.clone(), false));
        assert_ne!(live.version(), version, "{generation} {uid}");
        assert_eq!(live.contents().unwrap().objects[0].generation, Some(generation));
    }
    let version = live.version();
    assert!(live.put("ServiceExport", export, false));
    assert_eq!(live.version(), version);
}

#[tokio::test(start_paused = true)]
async fn a_kind_that_is_gone_twice_leaves_nothing_and_no_limit() {
    let live = LiveSource::with_limits(&KubernetesApi::default(), 1, BYTES_MAX);
    list(&live, &[service("a", 80)]);
    assert_eq!(count(&live), 1);
    live.failed("Service", Problem::Missing);
    assert_eq!(count(&live), 1, "the last state");
    live.failed("Service", Problem::Missing);
    assert_eq!(count(&live), 1, "the other kinds may be gone too");
    live.changed(live.version()).await;
    assert_eq!(count(&live), 0, "the minute is over");
}

#[test]
fn an_object_keeps_a_few_findings_and_errors_first() {
    let live = LiveSource::new(&KubernetesApi::default());
    let mut policy = service("a", 80);
    policy["kind"] = json!("ServiceExpositionPolicy");
    policy["apiVersion"] = json!("multicluster.istio.io/v1alpha1");
    policy["spec"] = json!({"exposed": vec![1; 200]});
    list(&live, &[]);
    assert!(live.put("ServiceExpositionPolicy", policy, false));
    let contents = live.contents().unwrap();
    assert_eq!(contents.objects[0].findings.0.len(), condition::FINDINGS_MAX);
}

#[tokio::test(start_paused = true)]
async fn a_list_of_far_fewer_objects_waits_for_its_time_or_an_operator() {
    for is_released in [true, false] {
        let live = LiveSource::new(&KubernetesApi::default());
        let (status, metrics) = (Status::default(), Metrics::new());
        list(&live, &services(12));
        assert_eq!(count(&live), 12);
        list(&live, &[service("s0", 81), service("new", 80)]);
        assert_eq!(count(&live), 13, "what is new or changed applies at once");
        live.report_hold(&status, &metrics);
        let held = status.held_objects.lock().clone().expect("a hold");
        let text = held.to_string();
        assert!(text.starts_with("11 removals by the API server are held from "), "{text}");
        assert!(text.contains("Service app/s1, ") && text.contains(" and 1 more; "), "{text}");
        assert!(held.names.contains("app/s9.app.svc.cluster.local"));
        assert!(metrics.encode().contains("strait_xds_held_removals 11\n"));
        assert!(live.put("Service", service("s1", 80), false));
        let version = live.version();
        if is_released {
            live.release("a test");
        } else {
            assert_eq!(count(&live), 13);
            live.changed(version).await;
        }
        assert_ne!(live.version(), version);
        assert_eq!(count(&live), 3, "the one that came back stays");
        live.report_hold(&status, &metrics);
        assert!(status.held_objects.lock().is_none());
        assert!(metrics.encode().contains("strait_xds_held_removals 0\n"));
    }
}

#[tokio::test(start_paused = true)]
async fn another_mass_removal_of_objects_waits_for_its_own_time() {
    let live = LiveSource::new(&KubernetesApi::default());
    list(&live, &services(24));
    assert_eq!(count(&live), 24);
    let begun = Instant::now();
    list(&live, &[]);
    assert_eq!(count(&live), 24);
    // All but two return, and go again.
    advance(Duration::from_secs(300)).await;
    list(&live, &services(24)[2..]);
    assert_eq!(count(&live), 24);
    advance(Duration::from_secs(61)).await;
    list(&live, &[]);
    assert_eq!(count(&live), 24);
    live.changed(live.version()).await;
    assert_eq!(begun.elapsed().as_secs(), 361 + 600);
    assert_eq!(count(&live), 0);
}

#[tokio::test(start_paused = true)]
async fn other_removals_of_objects_apply_at_once() {
    let hold = Duration::from_secs(600);
    for (time, seconds, left) in [(hold, 0, 3), (hold, 61, 0), (Duration::ZERO, 0, 0)] {
        let live = LiveSource::new(&KubernetesApi { hold: time, ..KubernetesApi::default() });
        list(&live, &services(12));
        assert_eq!(count(&live), 12);
        advance(Duration::from_secs(seconds)).await;
        for gone in &services(12)[left..] {
            live.remove("Service", gone);
            count(&live);
        }
        assert_eq!(count(&live), left, "{time:?} {seconds}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_removal_by_a_list_waits_until_the_other_kinds_are_listed_too() {
    let policy = |name: &str| {
        let mut policy = service(name, 80);
        policy["kind"] = json!("ServiceExpositionPolicy");
        policy["apiVersion"] = json!("multicluster.istio.io/v1alpha1");
        policy
    };
    for are_listed in [true, false] {
        let live = LiveSource::new(&KubernetesApi::default());
        list(&live, &services(12));
        assert!(live.put("ServiceExpositionPolicy", policy("a"), false));
        assert_eq!(count(&live), 13);
        advance(Duration::from_secs(61)).await;
        list_kind(&live, "ServiceExpositionPolicy", &[]);
        assert_eq!(count(&live), 13);
        let (status, metrics) = (Status::default(), Metrics::new());
        live.report_hold(&status, &metrics);
        assert!(status.held_objects.lock().is_none(), "no mass removal");
        assert!(metrics.encode().contains("strait_xds_held_removals 1\n"));
        if are_listed {
            for kind in ["Namespace", "Pod", "EndpointSlice"] {
                list_kind(&live, kind, &[]);
            }
            let version = live.version();
            list_kind(&live, "Service", &services(12));
            assert_ne!(live.version(), version, "an equal list is awaited");
            assert_eq!(count(&live), 13);
        }
        let now = Instant::now();
        live.changed(live.version()).await;
        let waited = if are_listed { 0 } else { 60 };
        assert_eq!(now.elapsed().as_secs(), waited);
        assert_eq!(count(&live), 12);
    }
}

#[tokio::test(start_paused = true)]
async fn a_policy_does_not_go_while_the_services_that_it_covers_are_held() {
    let live = LiveSource::new(&KubernetesApi::default());
    list(&live, &services(12));
    let mut policy = service("a", 80);
    policy["kind"] = json!("ServiceExpositionPolicy");
    policy["apiVersion"] = json!("multicluster.istio.io/v1alpha1");
    assert!(live.put("ServiceExpositionPolicy", policy, false));
    assert_eq!(count(&live), 13);
    advance(Duration::from_secs(61)).await;
    list_kind(&live, "ServiceExpositionPolicy", &[]);
    assert_eq!(count(&live), 13);
    list(&live, &[]);
    assert_eq!(count(&live), 13);
    live.release("a test");
    assert_eq!(count(&live), 0);
}

#[tokio::test(start_paused = true)]
async fn pods_that_others_replace_go_at_once_and_one_whose_address_another_has() {
    let pods = |from: u8, to| (from..to).map(|number| pod(&format!("p{number}"), number));
    let live = LiveSource::new(&KubernetesApi::default());
    let list_pods = |pods: &[Json]| {
        list(&live, &[]);
        list_kind(&live, "Pod", pods);
    };
    list_pods(&pods(0, 20).collect::<Vec<_>>());
    assert_eq!(count(&live), 20);
    list_pods(&pods(20, 40).collect::<Vec<_>>());
    assert_eq!(count(&live), 20, "a rollout");
    list_pods(&[pod("other", 20)]);
    let names = || live.contents().unwrap().objects.iter().map(|one| one.name.clone()).collect();
    let found: Vec<String> = names();
    assert_eq!(found.len(), 20);
    assert!(!found.iter().any(|name| name == "app/p20"), "its address is another one's");
    assert!(live.put("Pod", pod("later", 21), false));
    let found: Vec<String> = names();
    assert!(found.iter().any(|name| name == "app/later"));
    assert!(!found.iter().any(|name| name == "app/p21"), "{found:?}");
}

/// Returns an object of a kind of other projects in the namespace `app`.
fn entry(kind: &str, version: &str, name: &str) -> Json {
    let metadata = json!({"name": name, "namespace": "app"});
    let spec = json!({"exposed": [{"name": name, "clusters": ["west"]}]});
    json!({"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec})
}

const POLICY: &str = "ServiceExpositionPolicy";

fn policy(name: &str) -> Json {
    entry(POLICY, "multicluster.istio.io/v1alpha1", name)
}

fn export(name: &str) -> Json {
    entry("ServiceExport", "multicluster.x-k8s.io/v1beta1", name)
}

/// Returns the names of the objects of a kind.
fn names(live: &LiveSource, kind: &str) -> Vec<String> {
    let objects = live.contents().unwrap().objects;
    let of_kind = objects.iter().filter(|one| one.kind.0 == kind);
    of_kind.map(|one| one.name.clone()).collect()
}

#[tokio::test(start_paused = true)]
async fn a_policy_that_goes_before_or_after_the_services_of_its_namespace_is_held_with_them() {
    for is_before in [false, true] {
        let live = LiveSource::new(&KubernetesApi::default());
        list(&live, &services(12));
        assert!(live.put(POLICY, policy("a"), false));
        let mut other = policy("a");
        other["metadata"]["namespace"] = json!("other");
        assert!(live.put(POLICY, other.clone(), false));
        assert_eq!(count(&live), 14);
        advance(Duration::from_secs(61)).await;
        for (kind, _) in KINDS {
            let objects = match kind {
                "Service" => services(12),
                POLICY => vec![policy("a"), other.clone()],
                _ => Vec::new(),
            };
            list_kind(&live, kind, &objects);
        }
        assert_eq!(count(&live), 14);
        if is_before {
            live.remove(POLICY, &policy("a"));
            assert_eq!(count(&live), 13, "it may be a withdrawal");
            advance(Duration::from_secs(5)).await;
        }
        list_kind(&live, "Service", &[]);
        assert_eq!(names(&live, "Service").len(), 12);
        advance(Duration::from_secs(70)).await;
        live.remove(POLICY, &policy("a"));
        live.remove(POLICY, &other);
        assert_eq!(names(&live, POLICY), ["app/a"], "{is_before}: no service of the other");
        live.release("a test");
        assert_eq!(count(&live), 0);
    }
}

#[test]
fn an_export_waits_while_the_policies_cannot_be_read() {
    let live = LiveSource::new(&KubernetesApi::default());
    let label = |mut service: Json, key: &str, value: &str| {
        service["metadata"]["labels"] = json!({key: value});
        service
    };
    list(&live, &[service("old", 80), service("local", 80)]);
    assert!(live.put("ServiceExport", export("old"), false));
    assert!(live.put("Service", label(service("local", 80), "istio.io/global", "false"), false));
    assert_eq!(count(&live), 3);
    live.failed(POLICY, Problem::Failed("forbidden".to_owned()));
    for (kind, object) in [
        ("ServiceExport", export("new")),
        ("Service", service("new", 80)),
        ("Service", label(service("old", 81), "istio.io/global", "true")),
        ("Service", service("local", 80)),
        ("EndpointSlice", entry("EndpointSlice", "discovery.k8s.io/v1", "new")),
    ] {
        assert!(live.put(kind, object, false));
    }
    assert_eq!(names(&live, "ServiceExport"), ["app/old"]);
    assert_eq!(names(&live, "Service"), ["app/local", "app/old"]);
    assert_eq!(names(&live, "EndpointSlice"), ["app/new"], "endpoints are followed");
    let contents = live.contents().unwrap();
    let openness = contents.objects.iter().map(|one| one.read.openness());
    assert_eq!(openness.collect::<Vec<_>>(), [0, 0, 1, 1], "as before");
    live.judge(&contents, &[], &[]);
    let verdicts = live.verdicts().borrow().clone().unwrap();
    let reasons = verdicts.iter().map(|(one, of)| (&*one.name, of.as_ref().unwrap().reason));
    assert_eq!(reasons.collect::<Vec<_>>(), [("app/old", "Accepted"), ("app/new", "Refused")]);
    let what = &verdicts[1].1.as_ref().unwrap().message;
    assert!(what.contains("ServiceExpositionPolicy cannot be read"), "{what}");

    // Withdrawals and what opens nothing are followed.
    assert!(live.put("Service", service("old", 82), false));
    let ports = live.contents().unwrap();
    assert!(format!("{:?}", ports.read().collect::<Vec<_>>()).contains("82"));
    live.remove("ServiceExport", &export("old"));
    assert_eq!(names(&live, "ServiceExport"), [""; 0]);
    list_kind(&live, POLICY, &[policy("new")]);
    assert_eq!(names(&live, "ServiceExport"), ["app/new"]);
    assert_eq!(names(&live, "Service").len(), 3);
}

/// Returns a source for the namespaces with the label `mesh: in`.
fn selecting() -> LiveSource {
    let base = include_str!("../../../tests/corpus/findings/merge/base.yaml");
    let live = "discovery: {kind: kubernetes, namespaces: {matchLabels: {mesh: in}}}";
    let lines = base.lines().filter(|line| !line.starts_with("discovery:"));
    let text = lines.chain([live]).collect::<Vec<_>>().join("\n");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("s.yaml");
    let (config, findings) = Config::parse(&path, &text);
    let config = config.unwrap_or_else(|| panic!("{findings}"));
    LiveSource::new(config.kubernetes().unwrap())
}

fn namespace(name: &str, label: &str) -> Json {
    let metadata = json!({"name": name, "labels": {"mesh": label}});
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
}

#[tokio::test(start_paused = true)]
async fn a_lost_list_of_namespaces_takes_no_policy_from_its_services() {
    for number in [12, 3] {
        let all: Vec<_> = (0..number).map(|one| namespace(&format!("n{one}"), "in")).collect();
        let all = [&[namespace("app", "in")], &*all].concat();
        let live = selecting();
        list(&live, &services(12));
        list_kind(&live, "Namespace", &all);
        assert!(live.put("ServiceExport", export("s0"), false));
        assert!(live.put(POLICY, policy("s0"), false));
        assert_eq!(count(&live), all.len() + 14);
        advance(Duration::from_secs(61)).await;
        list_kind(&live, "Service", &services(12));
        assert_eq!(count(&live), all.len() + 14);
        list_kind(&live, "Namespace", &[]);
        assert_eq!([names(&live, "ServiceExport"), names(&live, POLICY)], [["app/s0"]; 2]);
        // Three Namespaces are too few for a hold, their services are not.
        let now = Instant::now();
        live.changed(live.version()).await;
        assert_eq!((now.elapsed().as_secs(), count(&live)), (600, 0), "{number}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_after_an_intact_watch_holds_a_mass_removal_and_makes_no_other_wait() {
    let live = LiveSource::new(&KubernetesApi::default());
    list(&live, &services(12));
    for name in ["a", "b"] {
        assert!(live.put("ServiceExport", export(name), false));
    }
    let list_again = |kind, items: &[Json]| {
        live.begin(kind);
        assert!(items.iter().all(|item| live.put(kind, item.clone(), true)));
        live.complete_after(kind, Before::Watch);
    };
    assert_eq!(count(&live), 14);
    advance(Duration::from_secs(61)).await;
    list_again("ServiceExport", &[export("a"), export("b")]);
    assert_eq!(count(&live), 14);
    live.remove("ServiceExport", &export("b"));
    assert_eq!(count(&live), 13, "a withdrawal");
    list_again("Service", &[]);
    assert_eq!(count(&live), 13);
    live.remove("ServiceExport", &export("a"));
    assert_eq!(count(&live), 13, "what goes in that minute waits too");
}
