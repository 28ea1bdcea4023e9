//! Deadlines, turns and times of the client, against an API server in memory.

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use http::{Method, Request, Response};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tower::service_fn;

use super::*;
use crate::config::KubernetesApi;

fn export(namespace: &str, name: &str, uid: &str) -> Json {
    json!({
        "apiVersion": "multicluster.x-k8s.io/v1beta1", "kind": "ServiceExport",
        "metadata": {"name": name, "namespace": namespace, "uid": uid, "generation": 1},
        "status": {"conditions": [
            {"type": condition::TYPE, "status": "True", "lastTransitionTime": "found"},
        ]},
    })
}

/// Returns a source with applied objects of the kind ServiceExport.
fn source(exports: &[Json]) -> Arc<LiveSource> {
    let live = LiveSource::new(&KubernetesApi::default());
    for (kind, _) in KINDS {
        live.begin(kind);
        live.complete(kind);
    }
    for export in exports {
        assert!(live.put("ServiceExport", export.clone(), false));
    }
    live.judge(&live.contents().expect("contents"), &[], &[]);
    Arc::new(live)
}

#[test]
fn a_kubeconfig_is_read_as_kube_reads_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("kubeconfig");
    let text = "apiVersion: v1\nkind: Config\ncurrent-context: 7\npreferences: {}\n\
                clusters:\n- name: 7\n  cluster:\n    server: https://10.0.0.1:6443\n    \
                certificate-authority: pki/ca.crt\n    insecure-skip-tls-verify: true\n\
                contexts:\n- name: 7\n  context: {cluster: 7, user: \"u\", namespace: 007}\n\
                ---\n# another document\nusers:\n- name: u\n  user: &u\n    token: 12e4\n    \
                tokenFile: /var/token\n    client-certificate: a.crt\n    \
                client-key: ../a.key\n    \
                exec: {apiVersion: v1, command: get-token, args: [1, x], env: null}\n\
                - name: w\n  user: *u\n";
    std::fs::write(&file, text).expect("a file");
    let [read, kubes] = [kubeconfig::read(&file).expect("a kubeconfig"), {
        kube::config::Kubeconfig::read_from(&file).expect("a kubeconfig")
    }]
    .map(|one| {
        let [u, w] = [0, 1].map(|user| format!("{:?}", one.auth_infos[user].auth_info));
        format!("{u} {w} {}", json!(one))
    });
    assert_eq!(read, kubes);
    assert!(read.contains("/var/token") && read.contains("12e4"), "{read}");
}

#[test]
fn an_error_of_a_connection_is_described_without_the_words_of_a_library() {
    let closed = io::Error::new(io::ErrorKind::UnexpectedEof, "close_notify: https://docs.rs");
    assert_eq!(describe(&closed), "the API server closed the connection");
    let late = io::Error::new(io::ErrorKind::TimedOut, "deadline has elapsed");
    assert_eq!(describe(&late), "the API server does not answer");
    let other = io::Error::from(io::ErrorKind::ConnectionRefused);
    assert_eq!(describe(&io::Error::other(other)), "connection refused");
}

#[tokio::test(start_paused = true)]
async fn a_list_that_drips_is_given_up() {
    let drips = service_fn(async |_: Request<kube::client::Body>| {
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(async move {
            while sender.send(Ok::<_, Infallible>(Bytes::from_static(b" "))).await.is_ok() {
                sleep(SILENCE / 2).await;
            }
        });
        Ok::<_, Infallible>(Response::new(Body::from_stream(ReceiverStream::new(receiver))))
    });
    let client = Client::new(drips, "default");
    let (live, begun) = (source(&[]), Instant::now());
    let End::Failed(why) =
        watch_version(&client, &resource("Service", "v1"), &live, Before::Gap).await
    else {
        panic!("the list goes on");
    };
    assert_eq!(why, "a page of the list takes more than 60 s");
    assert!(begun.elapsed() < 2 * PAGE_DEADLINE);
}

#[tokio::test(start_paused = true)]
async fn a_namespace_whose_conditions_cannot_be_written_delays_another_one_by_one_write() {
    let mut exports: Vec<_> =
        (0..100).map(|number| export("a", &format!("e{number}"), "")).collect();
    exports.push(export("b", "e", ""));
    let live = source(&exports);
    let asked = Arc::new(Mutex::new(Vec::new()));
    let (seen, written) = (Arc::clone(&asked), Arc::new(tokio::sync::Notify::new()));
    let done = Arc::clone(&written);
    let server = service_fn(move |request: Request<kube::client::Body>| {
        let (seen, done) = (Arc::clone(&seen), Arc::clone(&done));
        async move {
            assert_eq!(request.method(), Method::PATCH);
            let path = request.uri().path().to_owned();
            let is_slow = path.contains("/namespaces/a/");
            seen.lock().push(path);
            if is_slow {
                std::future::pending::<()>().await;
            }
            done.notify_one();
            let object = export("b", "e", "").to_string();
            Ok::<_, Infallible>(Response::new(Body::from(object)))
        }
    });
    let writes = write_conditions(Client::new(server, "default"), live, || true);
    tokio::select! {
        () = writes => panic!("the writer has ended"),
        () = written.notified() => {}
    }
    let asked = asked.lock().clone();
    assert!(asked[1].contains("/namespaces/b/"), "{asked:?}");
}

/// Each write is overwritten by another replica that does not agree.
#[tokio::test(start_paused = true)]
async fn a_condition_that_another_replica_overwrites_is_corrected_ever_later() {
    let live = source(&[export("a", "e", "x")]);
    let (writes, mut asked) = mpsc::channel(1);
    let server = service_fn(move |request: Request<kube::client::Body>| {
        let writes = writes.clone();
        async move {
            assert_eq!(request.method(), Method::PATCH);
            writes.send(Instant::now()).await.expect("a test");
            let object = export("a", "e", "x").to_string();
            Ok::<_, Infallible>(Response::new(Body::from(object)))
        }
    });
    let writer = write_conditions(Client::new(server, "default"), Arc::clone(&live), || true);
    let begun = Instant::now();
    let overwrites = async {
        let mut times = Vec::new();
        while let Some(at) = asked.recv().await {
            times.push((at - begun).as_secs());
            let (count, mut other) = (times.len(), export("a", "e", "x"));
            if count == 10 {
                break;
            }
            other["status"]["conditions"][0]["message"] = json!(format!("other {count}"));
            assert!(live.put("ServiceExport", other, false));
        }
        times
    };
    let times = tokio::select! {
        () = writer => panic!("the writer has ended"),
        times = overwrites => times,
    };
    let waits: Vec<_> = times.windows(2).map(|two| two[1] - two[0]).collect();
    assert_eq!(waits, [0, 60, 120, 240, 480, 960, 1920, 3600, 3600]);
}

#[tokio::test(start_paused = true)]
async fn the_events_of_own_conditions_cause_no_write() {
    let live = source(&[export("a", "e", "x")]);
    let (writes, mut asked) = mpsc::channel(4);
    let server = service_fn(move |request: Request<kube::client::Body>| {
        let writes = writes.clone();
        async move {
            let body = request.into_body().collect_bytes().await.expect("a body");
            let patch: Json = serde_json::from_slice(&body).expect("a patch");
            writes.send(patch["status"].clone()).await.expect("a test");
            let object = export("a", "e", "x").to_string();
            Ok::<_, Infallible>(Response::new(Body::from(object)))
        }
    });
    let writer = write_conditions(Client::new(server, "default"), Arc::clone(&live), || true);
    let events = async {
        let mut own = export("a", "e", "x");
        own["status"] = asked.recv().await.expect("a write");
        assert!(live.put("ServiceExport", own.clone(), false));
        assert!(timeout(2 * WRITE_IDLE, asked.recv()).await.is_err());
        own["status"]["conditions"][0]["reason"] = json!("Invalid");
        assert!(live.put("ServiceExport", own, false));
        let status = asked.recv().await.expect("a correction");
        assert_eq!(status["conditions"][0]["reason"], "Accepted");
    };
    tokio::select! {
        () = writer => panic!("the writer has ended"),
        () = events => {}
    }
}

/// The API server sends each write to all replicas.
#[tokio::test(start_paused = true)]
async fn replicas_that_start_together_write_each_condition_about_once() {
    const OBJECTS: usize = 100;
    fastrand::seed(1);
    let exports: Vec<_> =
        (0..OBJECTS).map(|number| export("a", &format!("e{number}"), "x")).collect();
    let replicas: Vec<_> = (0..5).map(|_| source(&exports)).collect();
    let writes = Arc::new(Mutex::new(HashMap::<_, usize>::new()));
    let (all, counted) = (replicas.clone(), Arc::clone(&writes));
    let server = service_fn(move |request: Request<kube::client::Body>| {
        let (all, counted) = (all.clone(), Arc::clone(&counted));
        async move {
            let name = request.uri().path().split('/').nth_back(1).expect("a name").to_owned();
            let body = request.into_body().collect_bytes().await.expect("a body");
            let patch: Json = serde_json::from_slice(&body).expect("a patch");
            sleep(Duration::from_millis(5)).await;
            let mut object = export("a", &name, "x");
            object["status"] = patch["status"].clone();
            for live in &all {
                assert!(live.put("ServiceExport", object.clone(), false));
            }
            *counted.lock().entry(name).or_default() += 1;
            Ok::<_, Infallible>(Response::new(Body::from(object.to_string())))
        }
    });
    let client = Client::new(server, "default");
    let mut writers = JoinSet::new();
    for live in replicas {
        writers.spawn(write_conditions(client.clone(), live, || true));
    }
    assert!(timeout(WRITE_RETRY, writers.join_next()).await.is_err(), "a writer has ended");
    let writes = writes.lock();
    assert_eq!(writes.len(), OBJECTS);
    let sum = writes.values().sum::<usize>();
    assert!(sum < OBJECTS * 3 / 2, "{sum} writes, not {} or more", 5 * OBJECTS);
}

#[test]
fn another_time_of_the_same_condition_is_no_change() {
    let live = source(&[export("a", "e", "x")]);
    let mut verdicts = live.verdicts();
    let mut is_change = |part: &str| {
        let mut object = export("a", "e", "x");
        object["status"]["conditions"][0][part] = json!("other");
        assert!(live.put("ServiceExport", object, false));
        let is_change = verdicts.has_changed().expect("a source");
        verdicts.mark_unchanged();
        is_change
    };
    assert_eq!(
        ["lastTransitionTime", "reason", "reason"].map(&mut is_change),
        [false, true, false]
    );
}

#[test]
fn namespaces_take_turns_from_the_one_after_the_last() {
    let names = ["a/1", "a/2", "a/3", "b/1", "c/1", "c/2"];
    let split = names.map(|name| name.split_once('/').expect("a namespace"));
    let live = source(&split.map(|(namespace, name)| export(namespace, name, "")));
    let verdicts = live.verdicts().borrow().clone().expect("verdicts");
    let order = |last| {
        let due = verdicts.iter().map(|(object, of)| (object, of.as_ref().expect("a condition")));
        let order = in_turns(due.collect(), last);
        order.into_iter().map(|(object, _)| object.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(order(""), ["a/1", "b/1", "c/1", "a/2", "c/2", "a/3"]);
    assert_eq!(order("a"), ["b/1", "c/1", "a/1", "c/2", "a/2", "a/3"]);
    assert_eq!(order("c"), order(""));
}

#[test]
fn the_time_of_a_transition_is_that_of_the_last_change_of_the_status() {
    let live = source(&[export("a", "e", "x")]);
    let object = Arc::clone(&live.contents().expect("contents").objects[0]);
    let condition = |holds| Condition { holds, reason: "Accepted", message: String::new() };
    let written = |holds| Written {
        object: Arc::clone(&object),
        condition: condition(holds),
        since: json!("written"),
        corrections: 0,
        correct_at: Instant::now(),
    };
    let since = |holds, last: Option<&Written>| match transition(&object, &condition(holds), last) {
        Json::String(time) if time.starts_with("20") => "now".to_owned(),
        time => time.as_str().unwrap_or_default().to_owned(),
    };
    assert_eq!(since(true, None), "found");
    assert_eq!(since(false, None), "now");
    // True, False and True again: the time that was found is that of the first one.
    assert_eq!(since(true, Some(&written(false))), "now");
    assert_eq!(since(false, Some(&written(false))), "written");
    let other = source(&[export("a", "e", "y")]);
    let other = Arc::clone(&other.contents().expect("contents").objects[0]);
    let last = Written { object: other, ..written(false) };
    assert_eq!(since(true, Some(&last)), "found", "the other object of the name");
}

/// Answer to a list with a policy that nests deeper than serde_json parses,
/// whose managed fields nest as deep.
#[tokio::test(start_paused = true)]
async fn an_object_that_cannot_be_parsed_is_invalid_alone() {
    let deep = format!("{}1{}", r#"{"a":"#.repeat(200), "}".repeat(200));
    let object = |name: &str, spec: &str| {
        format!(
            r#"{{"metadata": {{"name": "{name}", "namespace": "app", "resourceVersion": "7",
            "managedFields": [{{"fieldsV1": {spec}}}]}}, "spec": {spec}}}"#
        )
    };
    let items = [object("deep", &deep), object("flat", "{}")].join(",");
    let page =
        format!(r#"{{"kind": "L", "metadata": {{"resourceVersion": "7"}}, "items": [{items}]}}"#);
    let server = service_fn(move |request: Request<kube::client::Body>| {
        let is_watch = request.uri().query().unwrap_or_default().contains("watch");
        let gone = r#"{"type": "ERROR", "object": {"code": 410, "message": "", "reason": ""}}"#;
        let body = if is_watch { gone.to_owned() } else { page.clone() };
        async { Ok::<_, Infallible>(Response::new(Body::from(body))) }
    });
    let (kind, versions) =
        KINDS.into_iter().find(|(kind, _)| kind.ends_with("ExpositionPolicy")).expect("a kind");
    let live = source(&[]);
    live.begin(kind);
    let client = Client::new(server, "default");
    let end = watch_version(&client, &resource(kind, versions[0]), &live, Before::Gap).await;
    assert!(matches!(end, End::Gone));
    let objects = live.contents().expect("contents").objects;
    let found: Vec<_> = objects.iter().filter(|one| one.kind.0 == kind).collect();
    let names: Vec<_> = found.iter().map(|one| one.name.as_str()).collect();
    assert_eq!(names, ["app/deep", "app/flat"]);
    let what = found[0].findings.0.iter().map(ToString::to_string).collect::<String>();
    assert!(what.contains("cannot be parsed: recursion limit exceeded"), "{what}");
}

/// Returns a client of an API server that lists these objects and announces no change.
fn listing(objects: impl Iterator<Item = Json>) -> Client {
    let version = json!({"resourceVersion": "7"});
    let items: Vec<_> = objects.collect();
    let page = json!({"kind": "L", "metadata": version, "items": items}).to_string();
    let server = service_fn(move |request: Request<kube::client::Body>| {
        let is_watch = request.uri().query().unwrap_or_default().contains("watch");
        let page = page.clone();
        async move {
            let silent = tokio_stream::pending::<Result<Bytes, Infallible>>();
            let body = if is_watch { Body::from_stream(silent) } else { Body::from(page) };
            Ok::<_, Infallible>(Response::new(body))
        }
    });
    Client::new(server, "default")
}

#[tokio::test(start_paused = true)]
async fn a_kind_with_objects_left_out_is_listed_again_and_others_are_only_watched() {
    for (number, is_partial) in [(3, false), (4, true)] {
        let live = LiveSource::with_limits(&KubernetesApi::default(), 3, 1 << 20);
        let (kind, versions) =
            KINDS.into_iter().find(|(kind, _)| *kind == "ServiceExport").expect("a kind");
        let client = listing((0..number).map(|number| export("big", &format!("e{number}"), "x")));
        let (begun, resource) = (Instant::now(), resource(kind, versions[0]));
        let watch =
            timeout(10 * OVER_DELAY, watch_version(&client, &resource, &live, Before::Gap)).await;
        assert_eq!(live.is_partial(kind), is_partial);
        if is_partial {
            assert!(matches!(watch, Ok(End::Partial)));
            assert!((OVER_DELAY..2 * OVER_DELAY).contains(&begun.elapsed()));
        } else {
            assert!(watch.is_err(), "the watch goes on");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn while_objects_are_left_out_the_withdrawals_of_others_apply_at_once() {
    let live = Arc::new(LiveSource::with_limits(&KubernetesApi::default(), 3, 1 << 20));
    for (kind, _) in KINDS {
        live.begin(kind);
        live.complete(kind);
    }
    let other = export("other", "e", "x");
    let objects = (0..4).map(|number| export("big", &format!("e{number}"), "x"));
    let client = listing(objects.chain([other.clone()]));
    let (kind, versions) =
        KINDS.into_iter().find(|(kind, _)| *kind == "ServiceExport").expect("a kind");
    let watch = watch(client, kind, versions, Arc::clone(&live));
    let follow = async {
        // Lists at 0 and 60 s, and another window.
        for seconds in [59, 2] {
            sleep(Duration::from_secs(seconds)).await;
            live.contents().expect("contents");
        }
    };
    tokio::select! {
        () = watch => panic!("the watch ends"),
        () = follow => {}
    }
    assert!(live.is_partial(kind));
    live.remove(kind, &other);
    let objects = live.contents().expect("contents").objects;
    assert!(!objects.iter().any(|one| one.name == "other/e"), "it goes at once");
}
