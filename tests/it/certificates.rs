//! Certificates that are issued while the gateway runs, by Istio's authority and by a SPIFFE
//! Workload API.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rcgen::SanType;
use rustls::pki_types::ServerName;
use strait::tls::{self, IdentityMaterial};
use strait::tools::dev::Authority;
use strait::tools::hbone::Client;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::support::ca::Mode;
use crate::support::istiod::{Istiod, NAME, TOKEN};
use crate::support::workload_api::WorkloadApi;
use crate::support::{
    CLIENT, ECHO, Endpoint, GATEWAY, Gateway, Identities, Net, Settings, echoes, identities,
    replace, run, strait, until,
};

/// Past and remaining life. Half of this life is over a second from now.
const SHORT: (Duration, Duration) = (Duration::from_secs(9), Duration::from_secs(11));
/// Half of this one is over two seconds from now, and six remain in all.
const ENDING: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(6));

/// A gateway whose identity comes from the control plane at host 2 of its net, kept in `cache`.
fn of_istio(net: Net) -> Gateway {
    let keys = format!(
        "kind: istio-ca, address: \"{}\", roots: root.crt, token: token, san: {NAME}, \
         trust_domain: east.local, namespace: istio-system, service_account: eastwest, \
         cache: FOLDER/cache",
        net.address(2, 15012)
    );
    spawn(net, &keys)
}

/// A gateway with one endpoint and this identity.
fn spawn(net: Net, keys: &str) -> Gateway {
    let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "HBONE")]);
    settings.exposure = format!("    - {{service: \"{ECHO}\", to: [{{anyone: true}}]}}\n");
    Gateway::spawn(&settings, |folder| {
        std::fs::write(folder.join("token"), TOKEN).expect("a token");
        for unused in ["gateway.crt", "gateway.key"] {
            std::fs::remove_file(folder.join(unused)).expect("a file");
        }
        let file = folder.join("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a configuration");
        let files = "kind: files, chain: gateway.crt, key: gateway.key, roots: root.crt";
        assert!(text.contains(files));
        let keys = keys.replace("FOLDER", &folder.to_string_lossy());
        std::fs::write(file, text.replace(files, &keys)).expect("a configuration");
    })
}

async fn asks(gateway: &Gateway) -> Result<(), String> {
    let tls = identities().client(CLIENT, GATEWAY);
    asks_as(gateway, &tls).await
}

async fn asks_as(gateway: &Gateway, tls: &Arc<rustls::ClientConfig>) -> Result<(), String> {
    let client = Client::connect(gateway.address, tls).await;
    let client = client.map_err(|error| error.to_string())?;
    let tunnel = client.tunnel(ECHO).await;
    let mut tunnel = tunnel.map_err(|error| error.to_string())?;
    echoes(&mut tunnel).await;
    Ok(())
}

/// Returns the leaf of the gateway in a new handshake.
async fn shown(gateway: &Gateway) -> Vec<u8> {
    let stream = TcpStream::connect(gateway.address).await.expect("TCP");
    let connector = TlsConnector::from(identities().client(CLIENT, GATEWAY));
    let name = ServerName::IpAddress(gateway.address.ip().into());
    let stream = connector.connect(name, stream).await.expect("TLS");
    let chain = stream.get_ref().1.peer_certificates();
    chain.expect("a chain")[0].to_vec()
}

async fn dump(gateway: &Gateway) -> String {
    gateway.http(15000, "GET", "/config_dump").await.1
}

async fn fetches(gateway: &Gateway, result: &str) -> f64 {
    let name = format!("strait_certificate_fetches_total{{result=\"{result}\"}}");
    gateway.metric(&name).await
}

#[test]
fn the_data_path_opens_with_the_first_certificate_of_the_authority() {
    run(async {
        let net = Net::new();
        let mut gateway = of_istio(net);
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        gateway.logged("cannot obtain a new certificate").await;
        let (status, pending) = gateway.readiness().await;
        assert_eq!(status, 500);
        assert!(pending.contains("certificates") && pending.contains("listeners"), "{pending}");
        let refused = TcpStream::connect(gateway.address).await;
        refused.expect_err("nobody listens without a certificate");
        assert!(dump(&gateway).await.contains("Unavailable: "));

        let istiod = Istiod::default();
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;
        asks(&gateway).await.expect("a tunnel");
        let day = DAY.as_secs();
        let requested = istiod.ca.requests();
        assert_eq!(requested, [("east".to_owned(), i64::try_from(day).expect("a day"))]);
        let dump = dump(&gateway).await;
        assert!(dump.contains("\"Available\"") && dump.contains(GATEWAY), "{dump}");
        let now = SystemTime::UNIX_EPOCH.elapsed().expect("after 1970");
        for (kind, least) in [("leaf", 0.9), ("root", 300.0)] {
            let name = format!(
                "strait_certificate_expiry_timestamp_seconds{{identity=\"{GATEWAY}\",\
                 kind=\"{kind}\"}}"
            );
            let days = (gateway.metric(&name).await - now.as_secs_f64()) / 86_400.0;
            assert!((least..400.0).contains(&days), "{kind}: {days}");
        }
        assert!(fetches(&gateway, "error").await >= 1.0);
        assert!((fetches(&gateway, "ok").await - 1.0).abs() < 0.5);
    });
}

#[test]
fn listeners_that_change_before_the_first_certificate_open_with_it() {
    run(async {
        let net = Net::new();
        let mut gateway = of_istio(net);
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        gateway.logged("cannot obtain a new certificate").await;
        let file = gateway.file("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a file");
        let moved = net.address(1, 15018);
        let (old, new) = (net.address(1, 15008).to_string(), moved.to_string());
        replace(&file, &text.replace(&old, &new));
        let waiting = async || gateway.run_command(&["status"]).await.1;
        until("a moved listener", waiting, |page| {
            let mut lines = page.lines();
            lines.any(|line| line.contains(&new) && line.ends_with("waits for a certificate"))
        })
        .await;
        let refused = TcpStream::connect(moved).await;
        refused.expect_err("nobody listens without a certificate");

        let istiod = Istiod::default();
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;
        let tls = identities().client(CLIENT, GATEWAY);
        let client = Client::connect(moved, &tls).await.expect("a connection");
        echoes(&mut client.tunnel(ECHO).await.expect("a tunnel")).await;
        let refused = TcpStream::connect(gateway.address).await;
        refused.expect_err("nobody listens where nobody should");
    });
}

#[test]
fn what_the_authority_must_not_answer_is_reported_and_asked_for_again() {
    run(async {
        let net = Net::new();
        let istiod = Istiod::default();
        istiod.ca.set(Mode::Refuses);
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        let mut gateway = of_istio(net);
        for (next, line) in [
            (Mode::AnswersOneElement, "the authority refused the request: "),
            (Mode::SignsForAnother, "the answer has 1 parts"),
            (Mode::Signs, "signs for the identity of the token"),
        ] {
            gateway.logged(line).await;
            assert_eq!(gateway.readiness().await.0, 500);
            istiod.ca.set(next);
        }
        gateway.ready().await;
    });
}

#[test]
fn a_short_lived_certificate_is_replaced_under_open_tunnels() {
    run(async {
        let net = Net::new();
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let istiod = Istiod::default();
        istiod.ca.lives(SHORT.0, SHORT.1);
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        let mut gateway = of_istio(net);
        gateway.ready().await;
        let first = shown(&gateway).await;
        let client = gateway.client(identities()).await;
        let mut open = client.tunnel(ECHO).await.expect("a tunnel");
        let next = async || shown(&gateway).await;
        let second = until("the second one", next, |shown| *shown != first).await;
        until("the third one", next, |shown| *shown != first && *shown != second).await;
        echoes(&mut open).await;
        let mut more = client.tunnel(ECHO).await.expect("a tunnel on the old connection");
        echoes(&mut more).await;
        assert_eq!(gateway.readiness().await.0, 200);
        assert!((fetches(&gateway, "error").await).abs() < 0.5);

        // A certificate that arrives after a change of trust is served with the new domains. The
        // change is served with the certificate in force.
        let file = gateway.file("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a configuration");
        let west = "    - {name: west.local, cluster: west}\n";
        assert!(text.contains(west));
        replace(&file, &text.replace(west, ""));
        until("the refusal", async || asks(&gateway).await, Result::is_err)
            .await
            .expect_err("the domain is not in the set");
        let before = fetches(&gateway, "ok").await;
        let now = async || fetches(&gateway, "ok").await;
        until("one more", now, |now| *now > before).await;
        asks(&gateway).await.expect_err("the domain is not in the set");
    });
}

#[test]
fn an_authority_that_is_down_at_half_life_is_asked_until_it_is_back() {
    run(async {
        let net = Net::new();
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let istiod = Istiod::default();
        istiod.ca.lives(SHORT.0, SHORT.1);
        let serving = istiod.serve(net.address(2, 15012), identities()).await;
        let mut gateway = of_istio(net);
        gateway.ready().await;
        let first = shown(&gateway).await;
        serving.stop().await;
        gateway.logged("cannot obtain a new certificate").await;
        gateway.logged("expires at").await;
        let failing = async || gateway.metric("strait_certificate_failing").await;
        until("the metric", failing, |failing| *failing > 0.5).await;
        assert!(dump(&gateway).await.contains("Available: no new certificate"));
        let second = shown(&gateway).await;
        asks(&gateway).await.expect("a tunnel with the certificate in force");
        assert_eq!(gateway.readiness().await.0, 200);

        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        let next = async || shown(&gateway).await;
        until("a new one", next, |shown| *shown != first && *shown != second).await;
        until("the metric", failing, |failing| *failing < 0.5).await;
    });
}

#[test]
fn the_doctor_requests_a_certificate_and_dials_gateways_with_it() {
    run(async {
        let net = Net::new();
        let istiod = Istiod::default();
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        let mut gateway = of_istio(net);
        gateway.ready().await;
        let file = gateway.folder.path().join("strait.yaml");
        let mut text = std::fs::read_to_string(&file).expect("a configuration");
        let address = net.address(12, 15008);
        let _other = Endpoint::echo(net.listen(12, 15008).await);
        text += &format!("networks: [{{name: west, cluster: west, gateways: [\"{address}\"]}}]\n");
        std::fs::write(file, text).expect("a configuration");
        let doctor = async || {
            let mut doctor = strait();
            doctor.args(["doctor", "-c", "strait.yaml"]).current_dir(gateway.folder.path());
            let done = doctor.output().await.expect("an output");
            String::from_utf8(done.stdout).expect("text")
        };
        let found = doctor().await;
        assert!(
            found.contains(&format!("ok      certificate: {GATEWAY}, valid until ")),
            "{found}"
        );
        // It is dialled, and is no gateway of the cluster that the configuration names.
        let wrong = format!("failure gateway: network west: {address}");
        assert!(found.contains(&wrong), "{found}");
        istiod.ca.set(Mode::Refuses);
        let found = doctor().await;
        let refused = "failure certificate: none was issued: ";
        assert!(found.contains(refused) && found.contains("not today"), "{found}");
        assert!(found.contains("not dialled: no own certificate is usable"), "{found}");
    });
}

#[test]
fn a_certificate_that_ends_takes_readiness_with_it_until_there_is_a_new_one() {
    run(async {
        let net = Net::new();
        let istiod = Istiod::default();
        istiod.ca.lives(ENDING.0, ENDING.1);
        let serving = istiod.serve(net.address(2, 15012), identities()).await;
        let mut gateway = of_istio(net);
        gateway.ready().await;
        serving.stop().await;
        gateway.logged("peers would refuse the certificate in force").await;
        let (status, pending) = gateway.readiness().await;
        assert_eq!(status, 500);
        assert!(pending.contains("certificates"), "{pending}");
        assert!(dump(&gateway).await.contains("Unavailable: "));
        istiod.ca.lives(SHORT.0, SHORT.1);
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        // Four or five earlier failures have extended the backoff to up to 20 s.
        gateway.ready_within(Duration::from_secs(30)).await;
    });
}

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Makes the gateway use the list in `crl.pem`.
fn revoke(gateway: &Gateway, list: &str) {
    std::fs::write(gateway.file("crl.pem"), list).expect("a list");
    let file = gateway.file("strait.yaml");
    let text = std::fs::read_to_string(&file).expect("a configuration");
    let crl = "trust:\n  crl: {files: [crl.pem], on_missing: accept}\n";
    assert!(text.contains("trust:\n"));
    replace(&file, &text.replace("trust:\n", crl));
}

#[test]
fn a_certificate_of_a_revoked_intermediate_is_replaced_once_another_one_signs() {
    run(async {
        let net = Net::new();
        let authority = Authority::new().expect("a root");
        let [first, second] = [0, 1].map(|_| Arc::new(Identities::from_authority(&authority)));
        let istiod = Istiod::default();
        istiod.ca.rotate(Some(Arc::clone(&first)), &first.root);
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        let mut gateway = of_istio(net);
        gateway.ready().await;
        let file = gateway.file("cache/identity.json");
        let cached = async || std::fs::read(&file).ok();
        let stored = until("the cache", cached, Option::is_some).await;

        let list = authority.crl(&[&first.east.pem()], 1, SystemTime::now() + DAY);
        revoke(&gateway, &list.expect("a list"));
        gateway.logged("peers would refuse the certificate in force").await;
        // The authority is asked at once, and signs by the revoked intermediate again.
        gateway.logged("cannot obtain a new certificate").await;
        assert_eq!(gateway.readiness().await.0, 500);
        assert_eq!(cached().await, stored, "a refused certificate replaces none");
        istiod.ca.rotate(Some(second), &first.root);
        gateway.ready_within(Duration::from_secs(20)).await;
        until("the cache", cached, |now| now.is_some() && *now != stored).await;
    });
}

/// A gateway whose identity comes from the agent that it returns, which has none yet.
fn of_an_agent(net: Net) -> (Gateway, WorkloadApi, tokio::task::JoinSet<()>) {
    let gateway = spawn(net, "kind: spiffe, socket: \"unix://FOLDER/socket\"");
    let api = WorkloadApi::new();
    let serving = api.serve(&gateway.file("socket"));
    (gateway, api, serving)
}

#[test]
fn an_agent_rotates_an_identity_and_takes_it_back() {
    run(async {
        let net = Net::new();
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let (mut gateway, api, _serving) = of_an_agent(net);
        gateway.logged("has no identity for this workload").await;
        assert_eq!(gateway.readiness().await.0, 500);
        let root = &*identities().root;
        let give = || {
            let leaf = identities().leaf(GATEWAY);
            api.set_identity(GATEWAY, &leaf, root, &[("west.local", root)]);
        };
        give();
        gateway.ready().await;
        let first = shown(&gateway).await;
        let client = gateway.client(identities()).await;
        let mut open = client.tunnel(ECHO).await.expect("a tunnel");
        echoes(&mut open).await;
        give();
        let next = async || shown(&gateway).await;
        let second = until("a new one", next, |shown| *shown != first).await;
        echoes(&mut open).await;

        api.withdraw();
        let state = async || dump(&gateway).await;
        until("the state", state, |dump| {
            dump.contains("Available: no new certificate: the Workload API has no identity")
        })
        .await;
        assert_eq!(shown(&gateway).await, second, "it is served until it ends");
        echoes(&mut open).await;
        asks(&gateway).await.expect("a tunnel");
        assert_eq!(gateway.readiness().await.0, 200);
        give();
        until("a third one", next, |shown| *shown != second).await;
        until("the state", state, |dump| dump.contains("\"Available\"")).await;
    });
}

#[test]
fn an_agent_that_renews_nothing_is_asked_again_before_the_certificate_ends() {
    run(async {
        let (mut gateway, api, _serving) = of_an_agent(Net::new());
        let now = SystemTime::now();
        let end = now + Duration::from_secs(16);
        let leaf = identities().east.leaf_with(|params| {
            params.subject_alt_names = vec![SanType::URI(GATEWAY.try_into().expect("a URI"))];
            (params.not_before, params.not_after) = (now.into(), end.into());
        });
        api.set_identity(GATEWAY, &leaf.expect("a leaf"), &identities().root, &[]);
        gateway.ready().await;
        let before = api.streams();
        until("another stream", async || api.streams(), |now| *now > before).await;
        assert!(SystemTime::now() < end);
        gateway.logged("sent no renewal of the certificate").await;
    });
}

#[test]
fn a_refused_certificate_of_an_agent_changes_the_bundles_alone() {
    run(async {
        let net = Net::new();
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let (mut gateway, api, _serving) = of_an_agent(net);
        let root = &*identities().root;
        let good = identities().leaf(GATEWAY);
        api.set_identity(GATEWAY, &good, root, &[("west.local", root)]);
        gateway.ready().await;
        asks(&gateway).await.expect("a tunnel");
        let bad = identities().leaf(GATEWAY);
        let list = identities().east.crl(&[&bad.chain_pem], 1, SystemTime::now() + DAY);
        revoke(&gateway, &list.expect("a list"));
        let fresh = async || gateway.metric("strait_crls{state=\"fresh\"}").await;
        until("the list", fresh, |count| *count > 0.5).await;
        api.set_identity(GATEWAY, &bad, root, &[]);
        gateway.logged("(revoked): the certificate with serial").await;
        asks(&gateway).await.expect_err("no bundle of the domain");
        assert_eq!(gateway.readiness().await.0, 200, "the last good one is in force");
        // It is offered again on each stream, and accepted once the list has no entry of it.
        let empty = identities().east.crl(&[], 2, SystemTime::now() + DAY);
        replace(&gateway.file("crl.pem"), &empty.expect("a list"));
        let dump = async || dump(&gateway).await;
        until("the next one", dump, |dump| dump.contains("\"Available\"")).await;
    });
}

#[test]
fn an_agent_that_ends_each_stream_has_its_certificate_put_in_force_once() {
    run(async {
        let (mut gateway, api, _serving) = of_an_agent(Net::new());
        api.end_streams();
        let root = &*identities().root;
        api.set_identity(GATEWAY, &identities().leaf(GATEWAY), root, &[("west.local", root)]);
        gateway.ready().await;
        let before = api.streams();
        until("more streams", async || api.streams(), |now| *now >= before + 2).await;
        let log = gateway.log();
        assert_eq!(log.matches("certificate in force").count(), 1, "{log}");
        assert_eq!(gateway.readiness().await.0, 200);
    });
}

#[test]
fn a_federated_bundle_lets_its_domain_in_and_its_removal_refuses_it() {
    run(async {
        let net = Net::new();
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let (mut gateway, api, _serving) = of_an_agent(net);
        let leaf = identities().leaf(GATEWAY);
        let root = &*identities().root;
        api.set_identity(GATEWAY, &leaf, root, &[]);
        gateway.ready().await;
        gateway.logged("domains=\"west.local\"").await;
        asks(&gateway).await.expect_err("no bundle of the domain");
        let counted = async || gateway.refused_handshakes("untrusted_domain").await;
        until("the refusal", counted, |count| *count > 0.5).await;

        // The other domain's root is its own.
        let other = Identities::new();
        let peer = other.leaf(CLIENT);
        let peer =
            IdentityMaterial::from_pem(&peer.chain_pem, &peer.key_pem, root).expect("material");
        let peer = tls::client_config(&peer, &[GATEWAY]).expect("a client");
        api.set_identity(GATEWAY, &leaf, root, &[("west.local", &other.root)]);
        let asks_now = async || asks_as(&gateway, &peer).await;
        let first = until("the bundle", asks_now, Result::is_ok).await;
        first.expect("a tunnel");
        asks(&gateway).await.expect_err("the domain by another root");
        let counted = async || gateway.refused_handshakes("unknown_issuer").await;
        until("the refusal", counted, |count| *count > 0.5).await;

        api.set_identity(GATEWAY, &leaf, root, &[]);
        let refused = until("the removal", asks_now, Result::is_err).await;
        refused.expect_err("no bundle any more");
    });
}

/// Replaces a file by a pipe and waits until the gateway reads it, like a mount that hangs. It
/// hangs until the returned file is dropped.
async fn hangs(file: &Path) -> std::fs::File {
    let pipe = file.with_extension("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status();
    assert!(made.expect("mkfifo").success());
    std::fs::rename(&pipe, file).expect("a pipe in its place");
    // It can be opened for writing once it has a reader.
    let file = file.to_owned();
    let open = move || std::fs::OpenOptions::new().write(true).open(file);
    let opened = timeout(Duration::from_secs(20), tokio::task::spawn_blocking(open)).await;
    opened.expect("a reader").expect("no panic").expect("a pipe")
}

#[test]
fn a_file_that_hangs_holds_up_neither_renewal_nor_the_end_of_a_certificate() {
    run(async {
        let net = Net::new();
        let istiod = Istiod::default();
        istiod.ca.lives(SHORT.0, SHORT.1);
        let serving = istiod.serve(net.address(2, 15012), identities()).await;
        let mut gateway = of_istio(net);
        gateway.ready().await;
        let hanging = hangs(&gateway.file("mesh.yaml")).await;
        let first = shown(&gateway).await;
        istiod.ca.lives(ENDING.0, ENDING.1);
        until("a new one", async || shown(&gateway).await, |shown| *shown != first).await;
        serving.stop().await;
        gateway.logged("peers would refuse the certificate in force").await;
        let (status, pending) = gateway.readiness().await;
        assert!(status == 500 && pending.contains("certificates"), "{pending}");
        let failed = gateway.metric("strait_reload_total{what=\"mesh\",result=\"error\"}");
        assert!(failed.await.abs() < 0.5, "it still hangs");

        // The pipe yields an empty mesh, which is not valid.
        drop(hanging);
        gateway.logged("cannot apply changed file").await;
    });
}
