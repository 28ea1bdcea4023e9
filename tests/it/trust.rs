//! Changes of trust under open connections: roots, trust domains, revocation lists, expiry, and
//! trust domains that are not validated.

use std::sync::Arc;
use std::time::SystemTime;

use rustls::ClientConfig;
use strait::tls;
use strait::tools::dev::{Authority, Issuer, Leaf};
use strait::tools::hbone::{Client, Tunnel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Duration, Instant, timeout};

use crate::support::{
    CLIENT, ECHO, Endpoint, GATEWAY, Gateway, Identities, Net, Settings, broken, echoes, pod,
    process::strait, replace, run, until,
};

/// Promised limit of two seconds after a change, and one more for a loaded machine.
const DEADLINE: Duration = Duration::from_secs(3);
const OTHER: &str = "spiffe://west.local/ns/shop/sa/other";
const WEST: &str = "    - {name: west.local, cluster: west}\n";

/// A mesh whose root and intermediates sign revocation lists.
struct World {
    authority: Authority,
    identities: Identities,
    net: Net,
}

impl World {
    fn new() -> Self {
        let authority = Authority::new().expect("a root");
        Self { identities: Identities::from_authority(&authority), authority, net: Net::new() }
    }

    /// A gateway with an endpoint, its files changed by `prepare`.
    async fn gateway(&self, prepare: impl FnOnce(&std::path::Path)) -> (Gateway, Endpoint) {
        let mut settings = Settings::new(self.net, &self.identities).endpoints(&[(11, 1, "TCP")]);
        settings.exposure = format!("    - {{service: \"{ECHO}\", to: [{{anyone: true}}]}}\n");
        let mut gateway = Gateway::spawn(&settings, prepare);
        let endpoint = Endpoint::echo(self.net.listen(11, 9000).await);
        gateway.ready().await;
        (gateway, endpoint)
    }

    /// A gateway with `trust.crl` and these lists in its file.
    async fn gateway_with(&self, crl: &str, lists: &str) -> (Gateway, Endpoint) {
        self.gateway(|folder| {
            std::fs::write(folder.join("crl.pem"), lists).expect("a list");
            let file = folder.join("strait.yaml");
            let text = std::fs::read_to_string(&file).expect("a configuration");
            let crl = format!("{WEST}  crl: {{{crl}}}\n");
            std::fs::write(file, text.replace(WEST, &crl)).expect("a configuration");
        })
        .await
    }

    /// Lists of the root and of cluster west.
    fn lists(&self, number: u64, intermediates: &[&str], leaves: &[&str]) -> String {
        self.lists_until(number, (intermediates, leaves), hours(24))
    }

    fn lists_until(
        &self,
        number: u64,
        (intermediates, leaves): (&[&str], &[&str]),
        end: SystemTime,
    ) -> String {
        let of_root = self.authority.crl(intermediates, number, hours(24));
        let of_west = self.identities.west.crl(leaves, number, end);
        of_root.expect("a list") + &of_west.expect("a list")
    }

    fn client(&self, leaf: &Leaf) -> Arc<ClientConfig> {
        let material = self.identities.material(leaf);
        tls::client_config(&material, &[GATEWAY]).expect("a client")
    }
}

fn hours(count: u64) -> SystemTime {
    SystemTime::now() + Duration::from_secs(count * 3600)
}

fn edit(gateway: &Gateway, from: &str, to: &str) {
    let file = gateway.file("strait.yaml");
    let text = std::fs::read_to_string(&file).expect("a configuration");
    assert!(text.contains(from), "{from} in {text}");
    replace(&file, &text.replace(from, to));
}

async fn connect(gateway: &Gateway, tls: &Arc<ClientConfig>) -> (Client, Tunnel) {
    let client = Client::connect(gateway.address, tls).await;
    let client = client.expect("a connection");
    let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
    echoes(&mut tunnel).await;
    (client, tunnel)
}

/// Returns whether a new connection gets a tunnel.
async fn serves(gateway: &Gateway, tls: &Arc<ClientConfig>) -> bool {
    match Client::connect(gateway.address, tls).await {
        Ok(client) => client.tunnel(ECHO).await.is_ok(),
        Err(_) => false,
    }
}

/// Echoes on one tunnel until another one has been reset. Returns that time.
async fn reset_beside(lost: &mut Tunnel, kept: &mut Tunnel) -> Duration {
    let start = Instant::now();
    let mut lost = std::pin::pin!(broken(lost));
    let code = loop {
        tokio::select! {
            biased;
            code = &mut lost => break code,
            () = echoes(kept) => {}
        }
    };
    assert_eq!(code, Some(h2::Reason::INTERNAL_ERROR));
    echoes(kept).await;
    start.elapsed()
}

async fn untrusted(gateway: &Gateway, reason: &str, count: f64) {
    let name = format!("strait_connections_untrusted_total{{reason=\"{reason}\"}}");
    let counted = async || gateway.metric(&name).await;
    until(&name, counted, |&now| now >= count).await;
}

async fn refused(gateway: &Gateway, tls: &Arc<ClientConfig>, reason: &str) {
    let before = gateway.refused_handshakes(reason).await;
    assert!(!serves(gateway, tls).await, "{reason}");
    let now = async || gateway.refused_handshakes(reason).await;
    until(reason, now, |&now| now > before).await;
}

#[test]
fn a_removed_root_ends_the_connections_of_its_peers_and_of_no_others() {
    run(async {
        let world = World::new();
        let old = Authority::new().expect("a root");
        let of_old = old.intermediate("west").and_then(|west| west.leaf(CLIENT));
        let of_old = world.client(&of_old.expect("a leaf"));
        let of_new = world.client(&world.identities.leaf(CLIENT));
        let both = world.identities.root.clone() + &old.root_pem();
        let prepare = |folder: &std::path::Path| {
            std::fs::write(folder.join("root.crt"), &both).expect("roots");
        };
        let (gateway, _endpoint) = world.gateway(prepare).await;
        let (idle, unused) = connect(&gateway, &of_old).await;
        drop(unused);
        let (busy, mut lost) = connect(&gateway, &of_old).await;
        let (kept_client, mut kept) = connect(&gateway, &of_new).await;
        gateway.wait_until_open(3, 2).await;

        replace(&gateway.file("root.crt"), &world.identities.root);
        let took = reset_beside(&mut lost, &mut kept).await;
        assert!(took < DEADLINE, "{took:?}");
        for client in [&idle, &busy] {
            client.tunnel(ECHO).await.expect_err("no new tunnel");
        }
        untrusted(&gateway, "unknown_issuer", 2.0).await;
        gateway.wait_until_open(1, 1).await;
        assert!((gateway.tunnels("revoked").await - 1.0).abs() < 0.5);
        gateway.logged("open connections are no longer trusted").await;
        gateway.logged("its last issuer is ").await;
        refused(&gateway, &of_old, "unknown_issuer").await;
        echoes(&mut kept).await;
        kept_client.tunnel(ECHO).await.expect("a new tunnel");
        assert!(serves(&gateway, &of_new).await);
    });
}

#[test]
fn a_removed_trust_domain_ends_idle_connections_too() {
    run(async {
        let world = World::new();
        let (gateway, _endpoint) = world.gateway(|_| ()).await;
        let west = world.client(&world.identities.leaf(CLIENT));
        let east_id = "spiffe://east.local/ns/shop/sa/checkout";
        let east = world.client(&world.identities.leaf(east_id));
        let (_idle, unused) = connect(&gateway, &west).await;
        drop(unused);
        let (_client, mut lost) = connect(&gateway, &west).await;
        let (_other, mut kept) = connect(&gateway, &east).await;
        edit(&gateway, WEST, "");
        let took = reset_beside(&mut lost, &mut kept).await;
        assert!(took < DEADLINE, "{took:?}");
        untrusted(&gateway, "untrusted_domain", 2.0).await;
        gateway.wait_until_open(1, 1).await;
        gateway.logged("is not in trust.domains").await;
    });
}

#[test]
fn an_expired_intermediate_ends_new_tunnels_and_no_open_one() {
    run(async {
        let world = World::new();
        let end = SystemTime::now() + Duration::from_secs(4);
        let short = world.authority.intermediate_with("west", |params| {
            params.not_after = end.into();
        });
        let leaf = short.and_then(|short| short.leaf(CLIENT)).expect("a leaf");
        let (gateway, _endpoint) = world.gateway(|_| ()).await;
        let (client, mut open) = connect(&gateway, &world.client(&leaf)).await;
        let more = async || client.tunnel(ECHO).await.is_err();
        until("the end of new tunnels", more, |&ended| ended).await;
        assert!(SystemTime::now() >= end - Duration::from_secs(1));
        echoes(&mut open).await;
    });
}

#[test]
fn roots_that_a_peer_sends_behind_its_chain_do_not_count_and_foreign_authorities_do() {
    run(async {
        let world = World::new();
        let mut leaf = world.identities.leaf(CLIENT);
        let foreign = Authority::new().expect("a root");
        leaf.chain_pem += &(world.authority.root_pem() + &foreign.root_pem());
        let (gateway, _endpoint) = world.gateway(|_| ()).await;
        let (client, _open) = connect(&gateway, &world.client(&leaf)).await;
        client.tunnel(ECHO).await.expect("a second tunnel");
        leaf.chain_pem += &foreign.intermediate("old").expect("an authority").pem();
        refused(&gateway, &world.client(&leaf), "unknown_issuer").await;
    });
}

#[test]
fn a_revoked_leaf_loses_its_tunnels_and_its_neighbour_no_byte() {
    run(async {
        let world = World::new();
        let (bad, good) = (world.identities.leaf(CLIENT), world.identities.leaf(OTHER));
        let lists = world.lists(1, &[], &[]);
        let (gateway, _endpoint) = world.gateway_with("files: [crl.pem]", &lists).await;
        let (bad_tls, good_tls) = (world.client(&bad), world.client(&good));
        let (client, mut lost) = connect(&gateway, &bad_tls).await;
        let (_neighbour, mut kept) = connect(&gateway, &good_tls).await;

        replace(&gateway.file("crl.pem"), "-----BEGIN X509 CRL-----\nno\n");
        gateway.logged("cannot be used as a CRL").await;
        echoes(&mut lost).await;
        assert!(serves(&gateway, &bad_tls).await, "the old lists stay in force");

        let lists = world.lists(2, &[], &[&bad.chain_pem]);
        replace(&gateway.file("crl.pem"), &lists);
        let took = reset_beside(&mut lost, &mut kept).await;
        assert!(took < DEADLINE, "{took:?}");
        client.tunnel(ECHO).await.expect_err("no new tunnel");
        untrusted(&gateway, "revoked", 1.0).await;
        gateway.logged("is in CRL 2 of CN=Strait development").await;
        refused(&gateway, &bad_tls, "revoked").await;
        assert!(serves(&gateway, &good_tls).await);
        let (_, page, _) = gateway.run_command(&["status"]).await;
        assert!(page.contains("CRL of CN=") && page.contains("crl.pem"), "{page}");
    });
}

#[test]
fn a_revoked_intermediate_takes_all_its_peers_with_it() {
    run(async {
        let world = World::new();
        let lists = world.lists(1, &[], &[]);
        let (gateway, _endpoint) = world.gateway_with("files: [crl.pem]", &lists).await;
        let tls = world.client(&world.identities.leaf(CLIENT));
        let (_client, mut lost) = connect(&gateway, &tls).await;
        let lists = world.lists(2, &[&world.identities.west.pem()], &[]);
        replace(&gateway.file("crl.pem"), &lists);
        assert_eq!(broken(&mut lost).await, Some(h2::Reason::INTERNAL_ERROR));
        gateway.wait_until_open(0, 0).await;
        refused(&gateway, &tls, "revoked").await;
    });
}

#[test]
fn an_issuer_without_a_list_is_refused_unless_configured_otherwise() {
    run(async {
        let world = World::new();
        let of_root = world.authority.crl(&[], 1, hours(24)).expect("a list");
        let (gateway, _endpoint) = world.gateway_with("files: [crl.pem]", &of_root).await;
        let tls = world.client(&world.identities.leaf(CLIENT));
        refused(&gateway, &tls, "unknown_revocation").await;
        gateway.logged("`trust.crl` has no list for issuer CN=Strait").await;
        edit(&gateway, "[crl.pem]", "[crl.pem], on_missing: accept");
        let served = async || serves(&gateway, &tls).await;
        until("a tunnel", served, |&served| served).await;
        // A file without any content is not a list, and neither is a missing file.
        replace(&gateway.file("crl.pem"), "");
        let count = "strait_crls{state=\"fresh\"}";
        let lists = async || gateway.metric(count).await;
        until(count, lists, |&lists| lists < 0.5).await;
        assert!(serves(&gateway, &tls).await);
        std::fs::remove_file(gateway.file("crl.pem")).expect("a file");
        edit(&gateway, ", on_missing: accept", "");
        gateway.logged("crl.pem").await;
        assert!(serves(&gateway, &tls).await, "a missing file changes nothing");
    });
}

#[test]
fn a_root_without_a_list_is_logged_and_a_problem_until_it_has_one() {
    run(async {
        let world = World::new();
        let of_west = world.identities.west.crl(&[], 1, hours(24));
        let (gateway, _endpoint) =
            world.gateway_with("files: [crl.pem]", &of_west.expect("a list")).await;
        gateway
            .logged("`trust.crl` has no list of a trusted root: peers below it are refused")
            .await;
        let tls = world.client(&world.identities.leaf(CLIENT));
        refused(&gateway, &tls, "unknown_revocation").await;
        let page = async || gateway.run_command(&["status"]).await.1;
        let reported = "peers below CN=Strait development root";
        until(reported, page, |page| page.contains(reported)).await;
        replace(&gateway.file("crl.pem"), &world.lists(2, &[], &[]));
        until("no problem", page, |page| !page.contains(reported)).await;
        assert!(serves(&gateway, &tls).await);
    });
}

#[test]
fn a_stale_list_is_shown_and_refused_or_accepted_as_configured() {
    run(async {
        let world = World::new();
        let end = SystemTime::now() + Duration::from_secs(4);
        let lists = world.lists_until(1, (&[], &[]), end);
        let (gateway, _endpoint) = world.gateway_with("files: [crl.pem]", &lists).await;
        let tls = world.client(&world.identities.leaf(CLIENT));
        let (_client, mut lost) = connect(&gateway, &tls).await;
        let name = format!(
            "strait_certificate_expiry_timestamp_seconds{{identity=\"{GATEWAY}\",kind=\"crl\"}}"
        );
        let seconds = end.duration_since(SystemTime::UNIX_EPOCH).expect("a time");
        assert!((gateway.metric(&name).await - seconds.as_secs_f64()).abs() < 2.0);
        assert!((gateway.metric("strait_crls{state=\"fresh\"}").await - 2.0).abs() < 0.5);

        assert_eq!(broken(&mut lost).await, Some(h2::Reason::INTERNAL_ERROR));
        assert!(SystemTime::now() > end - Duration::from_secs(1));
        gateway.logged("a revocation list is stale").await;
        untrusted(&gateway, "stale_crl", 1.0).await;
        refused(&gateway, &tls, "stale_crl").await;
        assert!((gateway.metric("strait_crls{state=\"stale\"}").await - 1.0).abs() < 0.5);
        let ready = (200, "ready; stale revocation lists: 1\n".to_owned());
        assert_eq!(gateway.readiness().await, ready);
        let (_, page, _) = gateway.run_command(&["status"]).await;
        assert!(page.contains("crl.pem is stale"), "{page}");

        edit(&gateway, "[crl.pem]", "[crl.pem], on_stale: accept");
        let served = async || serves(&gateway, &tls).await;
        until("a tunnel", served, |&served| served).await;
    });
}

#[test]
fn the_own_certificate_in_a_new_list_ends_readiness_until_it_is_replaced() {
    run(async {
        let world = World::new();
        let lists = world.lists(1, &[], &[]);
        let crl = "files: [crl.pem], on_missing: accept";
        let (gateway, _endpoint) = world.gateway_with(crl, &lists).await;
        let read = |name: &str| std::fs::read_to_string(gateway.file(name)).expect("a file");
        let own = Leaf { chain_pem: read("gateway.crt"), key_pem: read("gateway.key") };
        let problem = async || gateway.metric("strait_certificate_renewal_problem").await;
        assert!(problem().await < 0.5);
        let tls = world.client(&world.identities.leaf(CLIENT));
        let (_client, mut open) = connect(&gateway, &tls).await;

        let of_east = world.identities.east.crl(&[&own.chain_pem], 1, hours(24));
        replace(&gateway.file("crl.pem"), &(lists + &of_east.expect("a list")));
        gateway.logged("peers would refuse the certificate in force").await;
        let (status, pending) = gateway.readiness().await;
        assert!(status == 500 && pending.contains("certificates"), "{pending}");
        let (_, page, _) = gateway.run_command(&["status"]).await;
        let why = "peers would refuse this certificate (revoked): the certificate with serial";
        assert!(page.contains(why), "{page}");
        assert!(problem().await > 0.5);
        // The lists of peers decide, not those of this gateway.
        echoes(&mut open).await;
        assert!(serves(&gateway, &tls).await);
        // Roots change nevertheless.
        let added = Authority::new().expect("a root");
        let of_added = added.intermediate("west").and_then(|west| west.leaf(CLIENT));
        let of_added = world.client(&of_added.expect("a leaf"));
        let both = world.identities.root.clone() + &added.root_pem();
        replace(&gateway.file("root.crt"), &both);
        let serves_added = async || serves(&gateway, &of_added).await;
        until("a new root", serves_added, |&serves| serves).await;
        replace(&gateway.file("root.crt"), &world.identities.root);
        until("no new root", serves_added, |&serves| !serves).await;
        assert_eq!(gateway.readiness().await.0, 500);

        let config = gateway.file("strait.yaml");
        let checked = strait().arg("check").arg("-c").arg(&config).kill_on_drop(true).output();
        let checked = timeout(10 * DEADLINE, checked).await.expect("an end").expect("its output");
        let text = String::from_utf8_lossy(&checked.stderr);
        assert!(!checked.status.success() && text.contains(why), "{text}");

        let write = |leaf: &Leaf| {
            replace(&gateway.file("gateway.key"), &leaf.key_pem);
            replace(&gateway.file("gateway.crt"), &leaf.chain_pem);
        };
        write(&world.identities.leaf(GATEWAY));
        until("no problem", problem, |&problem| problem < 0.5).await;
        write(&own);
        let page = async || gateway.run_command(&["status"]).await.1;
        until("the refusal", page, |page| page.contains(why)).await;
        assert_eq!(gateway.readiness().await.0, 200, "the last good one is in force");
    });
}

#[test]
fn a_revocation_list_applies_whatever_is_wrong_with_the_own_certificate() {
    run(async {
        let world = World::new();
        let bad = world.identities.leaf(CLIENT);
        let (gateway, _endpoint) =
            world.gateway_with("files: [crl.pem]", &world.lists(1, &[], &[])).await;
        let (_client, mut lost) = connect(&gateway, &world.client(&bad)).await;
        replace(&gateway.file("gateway.crt"), "no certificate");
        gateway.logged("gateway.crt: contains no certificate").await;
        replace(&gateway.file("crl.pem"), &world.lists(2, &[], &[&bad.chain_pem]));
        assert_eq!(broken(&mut lost).await, Some(h2::Reason::INTERNAL_ERROR));
        refused(&gateway, &world.client(&bad), "revoked").await;
    });
}

#[test]
fn a_new_certificate_is_used_while_a_file_of_trust_is_bad() {
    run(async {
        let world = World::new();
        let lists = world.lists(1, &[], &[]);
        let (gateway, _endpoint) = world.gateway_with("files: [crl.pem]", &lists).await;
        let (_, before) = gateway.http(15000, "GET", "/status?format=json").await;
        replace(&gateway.file("crl.pem"), "no list");
        gateway.logged("cannot be used as a CRL").await;
        let leaf = world.identities.leaf(GATEWAY);
        replace(&gateway.file("gateway.key"), &leaf.key_pem);
        replace(&gateway.file("gateway.crt"), &leaf.chain_pem);
        let serial = |page: &str| {
            let at = page.find("\"serial\"").expect("a serial number");
            page[at..].lines().next().unwrap_or_default().to_owned()
        };
        let page = async || gateway.http(15000, "GET", "/status?format=json").await.1;
        until("the new one", page, |page| serial(page) != serial(&before)).await;
        let tls = world.client(&world.identities.leaf(CLIENT));
        assert!(serves(&gateway, &tls).await, "the last lists are in force");
    });
}

#[test]
fn lists_of_equally_named_issuers_are_distinguished_by_their_keys() {
    run(async {
        let world = World::new();
        let twin = world.authority.intermediate("west").expect("a twin");
        let of_twin = |id: &str| twin.leaf(id).expect("a leaf");
        let (bad, good) = (of_twin(CLIENT), of_twin(OTHER));
        let of = |issuer: &Issuer, number, revoked: &[&str]| {
            issuer.crl(revoked, number, hours(24)).expect("a list")
        };
        let lists = world.authority.crl(&[], 1, hours(24)).expect("a list")
            + &of(&world.identities.west, 9, &[])
            + &of(&twin, 2, &[&bad.chain_pem])
            + &of(&twin, 1, &[]);
        let (gateway, _endpoint) = world.gateway_with("files: [crl.pem]", &lists).await;
        let first = world.client(&world.identities.leaf(CLIENT));
        assert!(serves(&gateway, &first).await);
        assert!(serves(&gateway, &world.client(&good)).await);
        refused(&gateway, &world.client(&bad), "revoked").await;
    });
}

#[test]
fn the_list_of_a_pods_crl_path_may_come_later() {
    run(async {
        let net = Net::new();
        let istiod = crate::support::istiod::Istiod::default();
        let serving = istiod.serve(net.address(2, 15012), crate::support::identities());
        let _serving = serving.await;
        let mut gateway = pod::spawn_with(net, "", &[("CRL_PATH", "ca-crl.pem")]);
        gateway.ready().await;
        let count = "strait_crls{state=\"fresh\"}";
        assert!(gateway.metric(count).await < 0.5);
        let west = &crate::support::identities().west;
        let list = west.crl(&[], 1, hours(24)).expect("a list");
        replace(&gateway.file("ca-crl.pem"), &list);
        let lists = async || gateway.metric(count).await;
        until(count, lists, |&lists| lists > 0.5).await;
    });
}

#[test]
fn without_validation_the_shared_root_decides_and_names_are_clusters() {
    run(async {
        let world = World::new();
        let north = "spiffe://north.local/ns/shop/sa/checkout";
        let issuer = world.authority.intermediate("north").expect("an issuer");
        let tls = world.client(&issuer.leaf(north).expect("a leaf"));
        let (gateway, _endpoint) = world.gateway(|_| ()).await;
        refused(&gateway, &tls, "untrusted_domain").await;
        let metric = "strait_trust_validation_skipped";
        assert!(gateway.metric(metric).await < 0.5);

        edit(&gateway, "trust:\n", "trust:\n  skip_validation: true\n");
        edit(&gateway, "to: [{anyone: true}]", "to: [{cluster: north.local}]");
        let served = async || serves(&gateway, &tls).await;
        until("a tunnel", served, |&served| served).await;
        let west = world.client(&world.identities.leaf(CLIENT));
        assert!(!serves(&gateway, &west).await, "it is of another cluster");
        assert!(gateway.metric(metric).await > 0.5);
        gateway.logged("is true: a peer of any trust domain is accepted").await;
        let (_, page, _) = gateway.run_command(&["status"]).await;
        assert!(page.contains("peers of any trust domain are accepted"), "{page}");
        // The root is still verified.
        let foreign = Authority::new().and_then(|other| other.intermediate("north"));
        let foreign = foreign.and_then(|other| other.leaf(north)).expect("a leaf");
        refused(&gateway, &world.client(&foreign), "unknown_issuer").await;

        let (_client, mut open) = connect(&gateway, &tls).await;
        edit(&gateway, "to: [{cluster: north.local}]", "to: [{anyone: true}]");
        edit(&gateway, "  skip_validation: true\n", "");
        assert_eq!(broken(&mut open).await, Some(h2::Reason::INTERNAL_ERROR));
        untrusted(&gateway, "untrusted_domain", 1.0).await;
    });
}

#[test]
fn a_root_that_is_replaced_by_one_of_its_name_ends_connections_below_it_and_counts_them() {
    run(async {
        let world = World::new();
        let own_roots = "    - {name: west.local, cluster: west, roots: west.pem}\n";
        let (gateway, _endpoint) = world
            .gateway(|folder| {
                std::fs::write(folder.join("west.pem"), &world.identities.root).expect("a root");
                let file = folder.join("strait.yaml");
                let text = std::fs::read_to_string(&file).expect("a configuration");
                std::fs::write(file, text.replace(WEST, own_roots)).expect("a configuration");
            })
            .await;
        let tls = world.client(&world.identities.leaf(CLIENT));
        let (_client, mut lost) = connect(&gateway, &tls).await;
        let next = world.authority.successor().expect("a root");
        replace(&gateway.file("west.pem"), &next.root_pem());
        assert_eq!(broken(&mut lost).await, Some(h2::Reason::INTERNAL_ERROR));
        untrusted(&gateway, "bad_signature", 1.0).await;
    });
}

#[test]
fn domains_that_no_entry_names_share_one_label_and_one_cluster_of_descriptors() {
    run(async {
        let world = World::new();
        let (gateway, _endpoint) = world
            .gateway(|folder| {
                let file = folder.join("strait.yaml");
                let text = std::fs::read_to_string(&file).expect("a configuration");
                let text = text.replace("trust:\n", "trust:\n  skip_validation: true\n");
                std::fs::write(file, text).expect("a configuration");
            })
            .await;
        let mut open = Vec::new();
        for name in ["north", "south", "center"] {
            let issuer = world.authority.intermediate(name).expect("an issuer");
            let id = format!("spiffe://{name}.local/ns/shop/sa/checkout");
            let tls = world.client(&issuer.leaf(&id).expect("a leaf"));
            let (_client, mut tunnel) = connect(&gateway, &tls).await;
            tunnel.shutdown().await.expect("our end");
            tunnel.read_to_end(&mut Vec::new()).await.expect("its end");
            open.push(connect(&gateway, &tls).await);
        }
        let name = "strait_tunnels_total{reason=\"completed\",source_cluster=\"unlisted\"}";
        let count = async || gateway.metric(name).await;
        until(name, count, |&count| count == 3.0).await;
        let page = gateway.scrape().await;
        let mut tunnels = page.lines().filter(|it| it.starts_with("strait_tunnels_total"));
        assert!(tunnels.all(|line| !line.contains(".local")), "{page}");
        let (_, status, _) = gateway.run_command(&["status"]).await;
        assert!(status.contains("cluster unlisted"), "{status}");
        assert!(!status.contains("cluster north.local"), "{status}");
        // The log has the domain's name.
        gateway.logged("src.cluster=\"north.local\"").await;
    });
}
