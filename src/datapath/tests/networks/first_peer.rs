//! Evaluation of the first peer behind a gateway, as `x-strait-source` names it.

use super::*;
use crate::datapath::first_peer::FirstPeer;
use crate::datapath::limits::descriptors::DescriptorPool;
use crate::datapath::policy::{self, Permit};
use crate::wire::SpkiHash;

const GATEWAY: &str = "spiffe://west.local/ns/edge/sa/gateway";
const NORTH: &str = "spiffe://north.local/ns/shop/sa/checkout";

fn table(audiences: &[(&str, &str)], transit: Transit) -> ExposureTable {
    let audience = |(cluster, namespace): &(&str, &str)| Audience {
        cluster: Some((*cluster).into()),
        namespaces: vec![(*namespace).into()],
        ..Audience::default()
    };
    let mut table = ExposureTable::new(false);
    for audiences in audiences {
        let entry = entry("echo.app", vec![audience(audiences)]);
        table.add(ExposedService { transit: Some(transit), ..entry });
    }
    table
}

fn trust() -> TrustSet {
    let domains = ["east", "west", "north"].map(|name| (format!("{name}.local"), name));
    let domains = domains.iter().map(|(domain, name)| (&**domain, *name));
    TrustSet::new(domains).with_gateways([GATEWAY])
}

/// Returns a snapshot that exposes the service to these namespaces of clusters, and trusts the
/// gateway.
fn snapshot(audiences: &[(&str, &str)], trust: TrustSet) -> Snapshot {
    let workloads = [pods("east", 1), vec![pod("north", 1), gateway("north", 2)]].concat();
    let rule = TrafficRule::default();
    let before = snapshot_with(Transit::Always, service(&[]), workloads, rule);
    let change = Change {
        exposure: Some(table(audiences, Transit::Always)),
        trust: Some(trust),
        ..Change::default()
    };
    build(&before, change)
}

fn permit(snapshot: &Snapshot, peer: &Peer, source: Option<&str>) -> Result<Permit, Reason> {
    let forwarded = Forwarded {
        via: Some((*b"0123456789abcdef").into()),
        source: source.map(|source| source.as_bytes().into()),
        ..Forwarded::default()
    };
    let target = target_of("echo.app:80", Some(forwarded));
    let permit = policy::run(snapshot, peer, route::resolve(snapshot, peer, target)?);
    permit.map_err(|rejection| rejection.reason)
}

#[test]
fn a_first_peer_outside_the_trust_set_is_refused_where_anyone_is_permitted() {
    let before = snapshot(&[], trust());
    let anyone = Audience { anyone: true, ..Audience::default() };
    let mut exposure = ExposureTable::new(false);
    exposure.add(entry("echo.app", vec![anyone]));
    let change = Change { exposure: Some(exposure), ..Change::default() };
    let snapshot = build(&before, change);
    let peer = peer_of(&snapshot, GATEWAY, Transit::Always);
    let foreign = "spiffe://unknown.local/ns/shop/sa/checkout";
    for (source, is_permitted) in [(NORTH, true), (foreign, false)] {
        let permit = permit(&snapshot, &peer, Some(source));
        assert_eq!(permit.is_ok(), is_permitted, "{source}");
    }
    let grant = permit(&snapshot, &peer, Some(NORTH)).expect("a permit");
    let endpoint = Arc::clone(&grant.route().endpoints.endpoints[0]);
    let grant = grant.into_grant(endpoint);
    assert_eq!(policy::still_allowed(&snapshot, &peer, &grant), Ok(()));
    let change = Change {
        trust: Some(TrustSet::new([("west.local", "west")]).with_gateways([GATEWAY])),
        ..Change::default()
    };
    let next = build(&snapshot, change);
    assert!(policy::still_allowed(&next, &peer, &grant).is_err());
}

#[test]
fn an_open_tunnel_ends_when_its_first_peer_loses_the_service() {
    let both = [("west", "edge"), ("west", "shop")];
    let first = snapshot(&both, trust());
    let peer = peer_of(&first, GATEWAY, Transit::Always);
    let permit = permit(&first, &peer, Some(CLIENT)).expect("a permit");
    let endpoint = Arc::clone(&permit.route().endpoints.endpoints[0]);
    let grant = permit.into_grant(endpoint);
    for (audiences, is_kept) in [(&both[..], true), (&both[..1], false), (&both[1..], false)] {
        let next = snapshot(audiences, trust());
        let judged = policy::still_allowed(&next, &peer, &grant);
        assert_eq!(judged.is_ok(), is_kept, "{audiences:?}");
    }
    // A gateway that is no longer trusted vouches for nobody.
    let distrusted = snapshot(&both, trust().with_gateways([]));
    assert!(policy::still_allowed(&distrusted, &peer, &grant).is_err());
}

#[test]
fn the_cluster_of_a_first_peer_counts_where_issuers_determine_clusters() {
    let issuers = [("west", 1), ("north", 2)].map(|(name, octet)| {
        let spki = SpkiHash::new([octet; 32]);
        (spki, name)
    });
    let trust = || {
        let trust = TrustSet::new([("west.local", "west")]).with_gateways([GATEWAY]);
        trust.with_issuers(issuers, false)
    };
    let snapshot = snapshot(&[("unknown", "edge"), ("west", "shop")], trust());
    // The test's peer has no issuer, and is thus of cluster unknown.
    let peer = peer_of(&snapshot, GATEWAY, Transit::Always);
    for (cluster, is_permitted) in
        [(Some("west"), true), (Some("north"), false), (Some("invented"), false), (None, false)]
    {
        let cluster = cluster.map(|cluster| format!(";cluster={cluster}"));
        let source = format!("{CLIENT}{}", cluster.unwrap_or_default());
        let permit = permit(&snapshot, &peer, Some(&source));
        assert_eq!(permit.is_ok(), is_permitted, "{source}");
    }
    let sent = FirstPeer::header(&peer);
    assert_eq!(sent, format!("{GATEWAY};cluster=unknown"));

    // Only issuers of the domain's list may sign for it.
    let source = format!("{CLIENT};cluster=west");
    for (octet, is_permitted) in [(1, true), (2, false)] {
        let list = Arc::new([SpkiHash::new([octet; 32])].into());
        let trust = trust().with_domain_issuers([("west.local", list)]);
        let change = Change { trust: Some(trust), ..Change::default() };
        let listed = build(&snapshot, change);
        let permit = permit(&listed, &peer, Some(&source));
        assert_eq!(permit.is_ok(), is_permitted, "issuer {octet}");
    }
}

#[test]
fn with_issuers_of_trust_domains_a_first_peer_is_permitted_unless_its_cluster_contradicts_them() {
    let list = || Arc::new([SpkiHash::new([1; 32])].into());
    let trust = trust().with_domain_issuers([("west.local", list()), ("north.local", list())]);
    let snapshot = snapshot(&[("west", "edge"), ("west", "shop")], trust);
    let peer = peer_of(&snapshot, GATEWAY, Transit::Always);
    for (cluster, is_permitted) in [
        (";cluster=west", true),
        // The first gateway may have another name for it, or none.
        (";cluster=west.local", true),
        ("", true),
        (";cluster=north", false),
        (";cluster=unknown", false),
    ] {
        let permit = permit(&snapshot, &peer, Some(&format!("{CLIENT}{cluster}")));
        let want = (!is_permitted).then_some(Reason::NotForPeer);
        assert_eq!(permit.err(), want, "{cluster:?}");
    }
}

#[test]
fn a_cluster_whose_name_no_header_can_have_is_not_sent() {
    let snapshot = snapshot(&[], trust());
    let mut peer = peer_of(&snapshot, CLIENT, Transit::Always);
    for (cluster, is_sent) in [
        ("west", true),
        ("arn:aws:eks:eu-1:1:cluster/west 2", true),
        ("", false),
        ("we;st", false),
        ("we,st", false),
        ("w\u{e9}st", false),
        (" west", false),
    ] {
        Arc::make_mut(&mut peer.source).cluster = cluster.into();
        let want = if is_sent { format!("{CLIENT};cluster={cluster}") } else { CLIENT.to_owned() };
        assert_eq!(FirstPeer::header(&peer), want);
    }
}

#[test]
fn one_first_peer_of_a_gateway_leaves_descriptors_to_the_others() {
    const ATTACKER: &str = "spiffe://west.local/ns/shop/sa/attacker";
    let snapshot = snapshot(&[("west", "edge"), ("west", "shop")], trust());
    let pool = DescriptorPool::new(1920);
    let of_listener = pool.register_listener().source([192, 0, 2, 1].into());
    let gateway = Peer {
        holders: Some(of_listener.for_identity(&"west".into(), &GATEWAY.into())),
        ..peer_of(&snapshot, GATEWAY, Transit::Always)
    };
    let fill = |source: Option<&str>| {
        let take = || {
            let permit = permit(&snapshot, &gateway, source).expect("a permit");
            permit.holders().expect("holders").dial().ok().map(|it| it.connected())
        };
        std::iter::from_fn(take).take(950).collect::<Vec<_>>()
    };
    let attacker = fill(Some(ATTACKER));
    assert!((400..=480).contains(&attacker.len()), "{}", attacker.len());
    let other = fill(Some(CLIENT));
    assert!(other.len() >= 50, "{}", other.len());
    assert!(fill(None).len() >= 50, "tunnels of the gateway itself");
    assert!(pool.pools()[0].used() <= 1920 / 2, "the share of the gateway");
    let [(name, open)] = &pool.tunnels()[..] else {
        panic!("one peer");
    };
    assert_eq!((&**name, *open), (GATEWAY, pool.pools()[0].used()));
}

#[test]
fn a_source_of_more_than_4_kib_is_malformed() {
    let snapshot = snapshot(&[("west", "edge"), ("west", "shop")], trust());
    let peer = peer_of(&snapshot, GATEWAY, Transit::Always);
    let long = format!("{CLIENT};later={}", "x".repeat(4096));
    assert_eq!(permit(&snapshot, &peer, Some(&long)).err(), Some(Reason::BadSource));
}
