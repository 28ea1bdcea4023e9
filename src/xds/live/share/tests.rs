//! Namespaces beyond their share, among those that stay within theirs.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fastrand::Rng;
use serde_json::{Value as Json, json};

use super::super::tests::{count, findings, list, list_kind};
use super::super::{BYTES_MAX, KINDS, LiveSource};
use super::{LEFT_OUT_MAX, ORDER, Size};
use crate::config::KubernetesApi;

const NAMESPACES: [&str; 4] = ["a", "b", "c", "d"];

fn object(kind: &str, namespace: &str, name: usize, bytes: usize) -> Json {
    let (_, versions) = KINDS.iter().find(|(known, _)| *known == kind).unwrap();
    let metadata = json!({"name": format!("o{name}"), "namespace": namespace});
    let spec = json!({"filler": "x".repeat(bytes)});
    json!({"apiVersion": versions[0], "kind": kind, "metadata": metadata, "spec": spec})
}

fn exports(namespace: &str, number: usize) -> Vec<Json> {
    (0..number).map(|name| object("ServiceExport", namespace, name, 0)).collect()
}

/// Returns a source that holds no removals.
fn limited(objects: usize) -> LiveSource {
    let api = KubernetesApi { hold: Duration::ZERO, ..KubernetesApi::default() };
    let live = LiveSource::with_limits(&api, objects, BYTES_MAX);
    list(&live, &[]);
    live
}

/// Returns the names of the objects of a namespace.
fn known(live: &LiveSource, namespace: &str) -> BTreeSet<(&'static str, String)> {
    let objects = live.contents().unwrap().objects;
    let of = objects.iter().filter(|one| one.namespace() == namespace);
    of.map(|one| (one.kind.0, one.name.clone())).collect()
}

fn is_closed(live: &LiveSource, namespace: &str) -> bool {
    findings(live).iter().any(|line| line.contains(&format!("namespace {namespace} is closed")))
}

#[test]
fn one_namespace_closes_itself_and_makes_room_for_others_until_a_list_fits() {
    let live = limited(12);
    list_kind(&live, "ServiceExport", &[exports("big", 100), exports("small", 3)].concat());
    assert!(is_closed(&live, "big") && !is_closed(&live, "small"));
    let closed = "Kubernetes: error: namespace big is closed: it has the most of more than 12 \
                  objects, or of more than 256 MiB in them, and some of its objects are left out; \
                  write a ResourceQuota into it";
    assert_eq!(findings(&live), [closed]);
    assert_eq!(known(&live, "small").len(), 3);
    assert!(live.is_partial("ServiceExport") && !live.is_partial("Pod"));
    for name in 0..4 {
        assert!(live.put("Pod", object("Pod", "other", name, 0), false));
    }
    assert_eq!((known(&live, "other").len(), known(&live, "small").len()), (4, 3));
    assert!(count(&live) <= 12);
    list_kind(&live, "ServiceExport", &[exports("big", 1), exports("small", 3)].concat());
    assert_eq!(findings(&live), [""; 0]);
    assert_eq!(count(&live), 8);
}

#[test]
fn what_claims_a_name_is_lost_last_in_any_order_of_the_kinds() {
    for is_reversed in [false, true] {
        let live = limited(8);
        let mut kinds = ORDER;
        if is_reversed {
            kinds.reverse();
        }
        for kind in kinds {
            for name in 0..4 {
                assert!(live.put(kind, object(kind, "big", name, 0), false));
            }
        }
        let kept: BTreeSet<_> = known(&live, "big").into_iter().map(|(kind, _)| kind).collect();
        assert!(kept.contains("ServiceExpositionPolicy"), "{kept:?}");
        let last = BTreeSet::from(["Pod", "RemoteServiceBinding", "ServiceExpositionPolicy"]);
        assert!(kept.is_subset(&last), "{kept:?}");
        assert!(is_closed(&live, "big"));
    }
}

#[test]
fn a_closed_namespace_gets_its_share_back_from_one_that_has_grown_since() {
    let live = limited(8);
    list_kind(&live, "ServiceExport", &exports("first", 9));
    assert!(is_closed(&live, "first"));
    list_kind(&live, "ServiceExport", &exports("later", 7));
    assert_eq!(known(&live, "first").len(), 0);
    let both = [exports("later", 7), exports("zfirst", 3)].concat();
    list_kind(&live, "ServiceExport", &both);
    assert!(is_closed(&live, "later") && !is_closed(&live, "zfirst"));
    assert_eq!(known(&live, "zfirst").len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_hold_keeps_nothing_that_makes_room() {
    let live = LiveSource::with_limits(&KubernetesApi::default(), 40, BYTES_MAX);
    list(&live, &[]);
    list_kind(&live, "ServiceExport", &exports("big", 39));
    assert_eq!(count(&live), 39);
    for name in 0..15 {
        assert!(live.put("Pod", object("Pod", "other", name, 0), false));
        assert!(count(&live) <= 40);
    }
    assert!(is_closed(&live, "big"));
    assert_eq!(known(&live, "other").len(), 15);
}

#[test]
fn conditions_of_a_closed_namespace_name_it() {
    let live = limited(4);
    let judge = |exports: &[Json]| {
        list_kind(&live, "ServiceExport", exports);
        live.judge(&live.contents().unwrap(), &[], &[]);
        live.verdicts().borrow().clone().unwrap()
    };
    let mut all = [exports("big", 9), exports("small", 1)].concat();
    let verdicts = judge(&all);
    assert_eq!(verdicts.len(), 10, "left out or not");
    for (object, condition) in verdicts.iter() {
        let condition = condition.as_ref().unwrap();
        let is_big = object.namespace() == "big";
        assert_eq!(condition.reason, if is_big { "Refused" } else { "Accepted" });
        assert_eq!(condition.message.starts_with("namespace big is closed: "), is_big);
    }
    let of_big = verdicts.iter().find(|(object, _)| object.namespace() == "big");
    let message = &of_big.unwrap().1.as_ref().unwrap().message;
    let written = json!({"type": "Accepted", "status": "False", "reason": "Refused",
        "message": message});
    for export in &mut all {
        export["status"] = json!({"conditions": [written]});
    }
    assert_eq!(judge(&all).len(), count(&live), "nothing is left to write");
    let many = [all, exports("large", 2 * LEFT_OUT_MAX)].concat();
    assert_eq!(judge(&many).len() - count(&live), LEFT_OUT_MAX);
    assert_eq!(judge(&exports("big", 2)).len(), 2);
}

/// Objects of a cluster, by kind, namespace and name, with their bytes.
type Truth = BTreeMap<(&'static str, &'static str, usize), usize>;

/// Checks a source against what the cluster has.
fn check(live: &LiveSource, truth: &Truth, limits: Size) {
    let size = live.state.lock().size();
    assert!(size.fits(limits), "{size:?}");
    for namespace in NAMESPACES {
        let own = truth.iter().filter(|((_, of, _), _)| *of == namespace);
        let wanted: BTreeSet<_> =
            own.map(|((kind, of, name), _)| (*kind, format!("{of}/o{name}"))).collect();
        let found = known(live, namespace);
        assert!(found.is_subset(&wanted), "{namespace} has what is gone");
        let is_closed = is_closed(live, namespace);
        assert!(is_closed || found == wanted, "{namespace} lacks objects, and is open");
        // `a` stays within a quarter of the number, and its objects are small.
        assert!(namespace != "a" || !is_closed, "{wanted:?}");
    }
}

#[test]
fn a_namespace_is_complete_or_closed_and_one_within_its_share_is_never_closed() {
    let limits = Size { objects: 24, bytes: 12_000 };
    let api = KubernetesApi { hold: Duration::ZERO, ..KubernetesApi::default() };
    for seed in 0..20 {
        let mut random = Rng::with_seed(seed);
        let live = LiveSource::with_limits(&api, limits.objects, limits.bytes);
        list(&live, &[]);
        let mut truth = Truth::new();
        for _ in 0..150 {
            let kind = ORDER[random.usize(..ORDER.len())];
            let namespace = NAMESPACES[random.usize(..NAMESPACES.len())];
            let name = random.usize(..if namespace == "a" { 1 } else { 9 });
            let key = (kind, namespace, name);
            let is_own = truth.keys().filter(|(_, of, _)| *of == "a").count() >= 6;
            match random.usize(..4) {
                0 => {
                    if truth.remove(&key).is_some() {
                        live.remove(kind, &object(kind, namespace, name, 0));
                    }
                }
                1 => {
                    let of = truth.iter().filter(|((of, ..), _)| *of == kind);
                    let items = of.map(|((_, of, name), bytes)| object(kind, of, *name, *bytes));
                    list_kind(&live, kind, &items.collect::<Vec<_>>());
                }
                _ if namespace == "a" && is_own && !truth.contains_key(&key) => {}
                _ => {
                    let bytes = if namespace == "a" { 1 } else { random.usize(..3000) };
                    truth.insert(key, bytes);
                    assert!(live.put(kind, object(kind, namespace, name, bytes), false));
                }
            }
            check(&live, &truth, limits);
        }
    }
}

#[test]
fn items_of_a_terse_list_count_by_what_they_take() {
    let kind = "ServiceExpositionPolicy";
    let policy = |namespace: &str, name, items| {
        let mut policy = object(kind, namespace, name, 0);
        policy["spec"] = json!({"exposed": vec![json!({"name": "a", "clusters": ["w"]}); items]});
        policy
    };
    let api = KubernetesApi { hold: Duration::ZERO, ..KubernetesApi::default() };
    let live = LiveSource::with_limits(&api, 100, 3_500_000);
    list(&live, &[]);
    let big = (0..3).map(|name| policy("big", name, 1000));
    list_kind(&live, kind, &big.chain([policy("small", 0, 1001)]).collect::<Vec<_>>());
    assert_eq!(findings(&live).len(), 1, "{:?}", findings(&live));
    assert!(live.put(kind, policy("small", 1, 1000), false));
    assert!(is_closed(&live, "big") && !is_closed(&live, "small"));
    live.judge(&live.contents().unwrap(), &[], &[]);
    let verdicts = live.verdicts().borrow().clone().unwrap();
    let reasons = verdicts.iter().map(|(one, of)| (&*one.name, of.as_ref().unwrap().reason));
    let reasons: BTreeMap<_, _> = reasons.collect();
    assert_eq!((reasons["small/o0"], reasons["small/o1"]), ("Invalid", "Accepted"));
}
