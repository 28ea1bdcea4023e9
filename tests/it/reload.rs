//! Changes while the gateway runs. A valid change applies within a second, an invalid one has no
//! effect, and an open tunnel ends only if it has lost its permission.

use std::os::unix::fs::PermissionsExt;

use h2::Reason;
use rustix::process::Signal;
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Duration, Instant};

use crate::scope::{started, write};
use crate::support::{
    CLIENT, ECHO, Endpoint, GATEWAY, Gateway, Identities, Net, Settings, broken, echoes,
    identities, mounted, raw, replace, run, until,
};

/// Time in which a valid file is in force, by docs/operations.md; a bound without slack.
const SECOND: Duration = Duration::from_secs(1);

/// Waits until changes of a source were read this many times.
pub async fn reloads(gateway: &Gateway, what: &str, result: &str, count: f64) {
    let name = format!("strait_reload_total{{what=\"{what}\",result=\"{result}\"}}");
    until(
        &name,
        async || gateway.metric(&name).await,
        // A change that takes several steps may be read more than once.
        |&now| now >= count,
    )
    .await;
}

/// An endpoint that sends its own name and then echoes.
fn named(listener: tokio::net::TcpListener, name: u8) -> Endpoint {
    Endpoint::new(listener, move |mut stream| async move {
        let _ = stream.write_u8(name).await;
        let (mut read, mut write) = stream.split();
        let _ = tokio::io::copy(&mut read, &mut write).await;
    })
}

#[test]
fn a_new_mesh_file_applies_within_a_second_and_a_bad_one_not_at_all() {
    run(async {
        let net = Net::new();
        let with = |host| Settings::new(net, identities()).endpoints(&[(host, 1, "TCP")]);
        let gateway = Gateway::start(&with(11)).await;
        let _first = named(net.listen(11, 9000).await, 11);
        let _second = named(net.listen(12, 9000).await, 12);
        let client = gateway.client(identities()).await;
        let name = async || {
            let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
            (tunnel.read_u8().await.expect("a name"), tunnel)
        };
        let (eleven, mut old) = name().await;
        assert_eq!(eleven, 11);

        replace(&gateway.file("mesh.yaml"), &with(12).mesh);
        let start = Instant::now();
        until("the new endpoint", async || name().await.0, |&name| name == 12).await;
        assert!(start.elapsed() < SECOND, "applied after {:?}", start.elapsed());
        reloads(&gateway, "mesh", "ok", 1.0).await;
        echoes(&mut old).await;

        replace(&gateway.file("mesh.yaml"), "services: [{name: echo, nmespace: app}]\n");
        reloads(&gateway, "mesh", "error", 1.0).await;
        assert_eq!(name().await.0, 12, "the previous state stays in use");
        gateway.logged("mesh.yaml:1: error: ").await;
        gateway.logged("nmespace").await;
    });
}

#[test]
fn a_tunnel_that_loses_its_right_is_reset_and_its_neighbour_lives() {
    run(async {
        let net = Net::new();
        let entry = |to: &str| format!("    - {{service: \"{ECHO}\", to: [{to}]}}\n");
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        settings.exposure = entry("{cluster: west}");
        let gateway = Gateway::start(&settings).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let shop = gateway.client(identities()).await;
        let bank = gateway.client_as(identities(), "spiffe://west.local/ns/bank/sa/teller").await;
        let mut lost = bank.tunnel(ECHO).await.expect("a tunnel");
        let mut kept = shop.tunnel(ECHO).await.expect("a tunnel");
        echoes(&mut lost).await;

        let config = std::fs::read_to_string(gateway.file("strait.yaml")).expect("a file");
        let (all, only) = (entry("{cluster: west}"), entry("{cluster: west, namespaces: [shop]}"));
        replace(&gateway.file("strait.yaml"), &config.replace(&all, &only));
        let start = Instant::now();
        assert_eq!(broken(&mut lost).await, Some(Reason::INTERNAL_ERROR));
        // One second to apply the file, one until a tunnel checks, one for a loaded machine.
        assert!(start.elapsed() < 3 * SECOND, "reset after {:?}", start.elapsed());
        echoes(&mut kept).await;
        assert!(bank.tunnel(ECHO).await.is_err(), "a new tunnel without a right");
        shop.tunnel(ECHO).await.expect("a new tunnel with one");
        until("revoked", async || gateway.tunnels("revoked").await, |&now| now == 1.0).await;

        replace(&gateway.file("strait.yaml"), "gateway: {cluster: east}\nlisteners: 5\n");
        reloads(&gateway, "config", "error", 1.0).await;
        echoes(&mut kept).await;
        assert!(bank.tunnel(ECHO).await.is_err(), "a bad file opened what was closed");
    });
}

#[test]
fn a_trust_domain_that_leaves_the_set_is_out_at_once() {
    run(async {
        let net = Net::new();
        let settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        let gateway = Gateway::start(&settings).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        echoes(&mut tunnel).await;
        let config = std::fs::read_to_string(gateway.file("strait.yaml")).expect("a file");
        let domain = "- {name: west.local, cluster: west}";
        let renamed = config.replace(domain, "- {name: west.example, cluster: west}");
        assert_ne!(config, renamed);
        replace(&gateway.file("strait.yaml"), &renamed);
        assert_eq!(broken(&mut tunnel).await, Some(Reason::INTERNAL_ERROR));
        assert!(client.tunnel(ECHO).await.is_err(), "a new tunnel on an old connection");
        let tls = identities().client(CLIENT, GATEWAY);
        let refused = match strait::tools::hbone::Client::connect(gateway.address, &tls).await {
            Ok(client) => client.tunnel(ECHO).await.map(|_| ()),
            Err(error) => Err(error),
        };
        assert!(refused.is_err());
        // The handshake is counted after its socket has lingered.
        until(
            "untrusted_domain",
            async || gateway.refused_handshakes("untrusted_domain").await,
            |&now| now == 1.0,
        )
        .await;
    });
}

/// Returns the gateway's leaf in a new handshake.
async fn served(gateway: &Gateway) -> CertificateDer<'static> {
    let stream = raw::session(gateway).await;
    let certificates = stream.get_ref().1.peer_certificates().expect("certificates");
    certificates[0].clone().into_owned()
}

#[test]
fn certificates_swapped_as_kubernetes_does_serve_new_handshakes_only() {
    run(async {
        let net = Net::new();
        let settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        let mut gateway = Gateway::spawn(&settings, mounted::mount);
        gateway.ready().await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");

        let mut count = 0.0;
        for version in ["..1", "..2", "..3"] {
            let leaf = mounted::swap(gateway.folder.path(), version, identities());
            let start = Instant::now();
            until(version, async || served(&gateway).await, |now| *now == leaf).await;
            assert!(start.elapsed() < SECOND, "{version} after {:?}", start.elapsed());
            count += 1.0;
            reloads(&gateway, "certificates", "ok", count).await;
        }
        echoes(&mut tunnel).await;

        let before = served(&gateway).await;
        let foreign = Identities::new().leaf(GATEWAY);
        replace(&gateway.file("..3/gateway.key"), &foreign.key_pem);
        reloads(&gateway, "certificates", "error", 1.0).await;
        assert_eq!(served(&gateway).await, before, "a key that does not fit changes nothing");
    });
}

#[test]
fn a_key_that_needs_a_restart_is_an_error_and_the_rest_applies() {
    run(async {
        let gateway = Gateway::start(&Settings::new(Net::new(), identities())).await;
        let config = std::fs::read_to_string(gateway.file("strait.yaml")).expect("a file");
        let level = "log: {level: debug}\n";
        let changed = format!("{config}workers: 3\n{level}");
        replace(&gateway.file("strait.yaml"), &changed);
        reloads(&gateway, "config", "error", 1.0).await;
        gateway.logged("`workers` needs a restart").await;
        let problem = "strait.yaml: `workers` needs a restart; the value of the start stays";
        let (code, text, _) = gateway.run_command(&["status"]).await;
        assert_eq!(code, 0, "{text}");
        assert!(text.contains(problem), "{text}");
        assert!(text.contains("in use except for a part"), "{text}");
        let (_, set) = gateway.http(15000, "POST", "/logging?reset").await;
        assert_eq!(set, "current log level is debug\n", "the rest applies");
        let (status, dump) = gateway.http(15000, "GET", "/config_dump").await;
        assert_eq!(status, 200);
        assert!(dump.contains("\"workers\":0") || dump.contains("\"workers\": 0"), "{dump}");
        replace(&gateway.file("strait.yaml"), &(config + level));
        reloads(&gateway, "config", "ok", 1.0).await;
        let (_, text, _) = gateway.run_command(&["status"]).await;
        assert!(!text.contains("needs a restart"), "{text}");
    });
}

#[test]
fn certificates_in_a_folder_that_was_replaced_are_served() {
    run(async {
        let settings = Settings::new(Net::new(), identities());
        let mut gateway = Gateway::spawn(&settings, |folder| {
            std::fs::create_dir_all(folder.join("pki/certs")).expect("the folders");
            for file in ["gateway.crt", "gateway.key"] {
                let moved = folder.join("pki/certs").join(file);
                std::fs::rename(folder.join(file), moved).expect("a rename");
            }
            let config = std::fs::read_to_string(folder.join("strait.yaml")).expect("a file");
            let config = config.replace("gateway.", "pki/certs/gateway.");
            std::fs::write(folder.join("strait.yaml"), config).expect("a file");
        });
        gateway.ready().await;
        let certs = gateway.file("pki/certs");
        for round in 1..=2 {
            std::fs::remove_dir_all(&certs).expect("no folder");
            let leaf = mounted::write(&certs, identities());
            let what = format!("round {round}: replaced at once");
            until(&what, async || served(&gateway).await, |now| *now == leaf).await;

            std::fs::remove_dir_all(gateway.file("pki")).expect("no folder");
            reloads(&gateway, "certificates", "error", f64::from(round)).await;
            std::fs::create_dir(gateway.file("pki")).expect("a folder");
            let leaf = mounted::write(&certs, identities());
            let what = format!("round {round}: replaced later");
            until(&what, async || served(&gateway).await, |now| *now == leaf).await;
        }
    });
}

#[test]
fn a_certificate_that_peers_would_refuse_leaves_the_last_one_in_force_and_is_shown() {
    run(async {
        let identities = identities();
        let gateway = Gateway::start(&Settings::new(Net::new(), identities)).await;
        let failing = async || gateway.metric("strait_certificate_failing").await;
        assert!(failing().await < 0.5);
        let before = served(&gateway).await;
        let write = |leaf: &strait::tools::dev::Leaf| {
            std::fs::write(gateway.file("gateway.key"), &leaf.key_pem).expect("a key");
            replace(&gateway.file("gateway.crt"), &leaf.chain_pem);
        };
        let named = |params: &mut rcgen::CertificateParams| {
            let uri = GATEWAY.try_into().expect("a URI");
            params.subject_alt_names = vec![rcgen::SanType::URI(uri)];
        };
        let clients_only = identities.east.leaf_with(|params| {
            named(params);
            params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
        });
        write(&clients_only.expect("a leaf"));
        until("the failure", failing, |now| *now > 0.5).await;
        assert_eq!(served(&gateway).await, before);
        let (ready, _) = gateway.http(15021, "GET", "/healthz/ready").await;
        assert_eq!(ready, 200, "the last one is in force");
        let (_, page) = gateway.http(15000, "GET", "/status").await;
        assert!(page.contains("peers would refuse this certificate (bad_key_usage)"), "{page}");

        // Not valid yet, and then valid without a change of the file.
        let soon = identities.east.leaf_with(|params| {
            named(params);
            params.not_before = (std::time::SystemTime::now() + 2 * SECOND).into();
        });
        write(&soon.expect("a leaf"));
        until("the next one", async || served(&gateway).await, |now| *now != before).await;
        until("the success", failing, |now| *now < 0.5).await;
    });
}

#[test]
fn a_change_whose_other_file_arrives_later_is_applied_then() {
    run(async {
        let gateway = Gateway::start(&Settings::new(Net::new(), identities())).await;
        let config = std::fs::read_to_string(gateway.file("strait.yaml")).expect("a file");
        let own = config.replace("cluster: west}\n", "cluster: west, roots: pki/west.crt}\n");
        assert_ne!(config, own);
        replace(&gateway.file("strait.yaml"), &own);
        reloads(&gateway, "config", "error", 1.0).await;
        std::fs::create_dir(gateway.file("pki")).expect("a folder");
        std::fs::write(gateway.file("pki/west.crt"), &identities().root).expect("a root");
        let start = Instant::now();
        reloads(&gateway, "config", "ok", 1.0).await;
        assert!(start.elapsed() < SECOND, "after {:?}", start.elapsed());

        let of_roots = format!(
            "strait_certificate_expiry_timestamp_seconds{{identity=\"{GATEWAY}\",\
             kind=\"domain_root\"}}"
        );
        let now = std::time::UNIX_EPOCH.elapsed().expect("after 1970");
        assert!(gateway.metric(&of_roots).await > now.as_secs_f64());
        for page in ["/config_dump", "/status"] {
            let (_, text) = gateway.http(15000, "GET", page).await;
            assert!(text.contains("trust domain west.local"), "{page}: {text}");
        }

        let errors = "strait_reload_total{what=\"certificates\",result=\"error\"}";
        std::fs::write(gateway.file("pki/west.crt"), "no root").expect("a file");
        until(
            "the new file is watched as well",
            async || gateway.metric(errors).await,
            |&now| now >= 1.0,
        )
        .await;

        replace(&gateway.file("strait.yaml"), &config);
        reloads(&gateway, "config", "ok", 2.0).await;
        let (_, dump) = gateway.http(15000, "GET", "/config_dump").await;
        assert!(!dump.contains("trust domain west.local"), "{dump}");
        assert!(gateway.metric(&of_roots).await.abs() < 0.5);
    });
}

#[test]
fn a_configured_name_that_a_service_takes_is_a_warning_and_stops_no_reload() {
    run(async {
        let settings = Settings::new(Net::new(), identities());
        let gateway = Gateway::start(&settings).await;
        let config = std::fs::read_to_string(gateway.file("strait.yaml")).expect("a file");
        let taken = config.replace("echo.global", "secret.app.svc.cluster.local");
        assert_ne!(config, taken);
        replace(&gateway.file("strait.yaml"), &taken);
        reloads(&gateway, "config", "ok", 1.0).await;
        let name = "the name secret.app.svc.cluster.local is that of another service";
        gateway.logged(name).await;
        let alias = "names: {aliases: [{name: secret.app.svc.cluster.local, \
                     to: echo.app.svc.cluster.local}]}\n";
        replace(&gateway.file("strait.yaml"), &format!("{config}{alias}"));
        reloads(&gateway, "config", "ok", 2.0).await;
        let name = "the alias secret.app.svc.cluster.local is a service's own name";
        gateway.logged(name).await;

        let without = settings.mesh.replace("secret", "public");
        replace(&gateway.file("mesh.yaml"), &without);
        reloads(&gateway, "mesh", "ok", 1.0).await;
        // A tenant creates such a service while the gateway runs.
        replace(&gateway.file("mesh.yaml"), &settings.mesh);
        reloads(&gateway, "mesh", "ok", 2.0).await;

        let unknown = config.replace("echo.app.svc", "ehco.app.svc");
        replace(&gateway.file("strait.yaml"), &unknown);
        reloads(&gateway, "config", "ok", 3.0).await;
        gateway.logged("ehco.app.svc.cluster.local is not a service of").await;
    });
}

#[test]
fn a_new_log_level_is_what_reset_goes_back_to() {
    run(async {
        let gateway = Gateway::start(&Settings::new(Net::new(), identities())).await;
        let config = std::fs::read_to_string(gateway.file("strait.yaml")).expect("a file");
        let level = "log: {level: \"debug, h2=warn\"}\n";
        replace(&gateway.file("strait.yaml"), &(config + level));
        reloads(&gateway, "config", "ok", 1.0).await;
        let (_, set) = gateway.http(15000, "POST", "/logging?level=trace").await;
        assert_eq!(set, "current log level is trace\n");
        let (_, reset) = gateway.http(15000, "POST", "/logging?reset").await;
        assert_eq!(reset, "current log level is debug,h2=warn\n");
    });
}

#[test]
fn a_link_exposes_more_to_one_peer_than_a_selection_to_another_until_it_changes() {
    run(async {
        let net = Net::new();
        let secret = "secret.app.svc.cluster.local:80";
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        settings.exposure = format!("    - {{service: \"{ECHO}\", to: [{{cluster: east}}]}}\n");
        settings.more += "links: [{from: west, to: east, exposes: [\"*.app.global\"]}]\n";
        settings.more += "names: {suffixes: [svc.cluster.local, global]}\n";
        let gateway = Gateway::start(&settings).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let west = gateway.client(identities()).await;
        let own = "spiffe://east.local/ns/shop/sa/checkout";
        let east = gateway.client_as(identities(), own).await;
        let mut lost = west.tunnel(ECHO).await.expect("a tunnel");
        let mut kept = west.tunnel(secret).await.expect("a tunnel");
        let mut selected = east.tunnel(ECHO).await.expect("a tunnel");
        assert!(east.tunnel(secret).await.is_err(), "beyond the selection of another peer");
        echoes(&mut lost).await;

        let config = std::fs::read_to_string(gateway.file("strait.yaml")).expect("a file");
        let narrow = config.replace("*.app.global", "secret.app.global");
        replace(&gateway.file("strait.yaml"), &narrow);
        assert_eq!(broken(&mut lost).await, Some(Reason::INTERNAL_ERROR));
        echoes(&mut kept).await;
        echoes(&mut selected).await;
    });
}

/// Number of reloads of every source, by result.
async fn reload_counts(gateway: &Gateway, result: &str) -> [f64; 4] {
    let mut counts = [0.0; 4];
    let sources = ["certificates", "config", "mesh", "objects"];
    for (count, what) in counts.iter_mut().zip(sources) {
        let name = format!("strait_reload_total{{what=\"{what}\",result=\"{result}\"}}");
        *count = gateway.metric(&name).await;
    }
    counts
}

#[test]
fn sighup_reads_all_files_again_and_a_bad_one_keeps_the_last_good_state() {
    run(async {
        let net = Net::new();
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        settings.exposure += "  files: [objects]\n";
        let mut gateway = Gateway::spawn(&settings, |folder| {
            std::fs::create_dir(folder.join("objects")).expect("a folder");
        });
        gateway.ready().await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        let mut old = client.tunnel(ECHO).await.expect("a tunnel");
        assert_eq!(reload_counts(&gateway, "ok").await, [0.0; 4]);

        gateway.signal(Signal::USR1);
        gateway.signal(Signal::USR2);
        gateway.signal(Signal::HUP);
        let counts = async || reload_counts(&gateway, "ok").await;
        until("all sources", counts, |now| *now == [1.0; 4]).await;
        gateway.logged("reading all files again").await;
        echoes(&mut old).await;

        replace(&gateway.file("mesh.yaml"), "services: [{nmespace: app}]\n");
        reloads(&gateway, "mesh", "error", 1.0).await;
        gateway.signal(Signal::HUP);
        reloads(&gateway, "mesh", "error", 2.0).await;
        reloads(&gateway, "config", "ok", 2.0).await;
        echoes(&mut old).await;
        echoes(&mut client.tunnel(ECHO).await.expect("a new tunnel")).await;
        assert!(gateway.is_running());
    });
}

#[test]
fn each_source_applies_while_others_are_unusable() {
    run(async {
        let net = Net::new();
        let with = |host| Settings::new(net, identities()).endpoints(&[(host, 1, "TCP")]);
        let mut settings = with(11);
        settings.exposure += "  files: [objects]\n";
        let gateway = started(&settings, "").await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        write(gateway.folder.path(), "all.yaml", "kind: [\n");
        reloads(&gateway, "objects", "error", 1.0).await;

        let file = gateway.file("strait.yaml");
        let config = std::fs::read_to_string(&file).expect("a file");
        let closed = config.replace("cluster: west}]", "cluster: west, namespaces: [bank]}]");
        assert_ne!(config, closed);
        replace(&file, &closed);
        assert_eq!(broken(&mut tunnel).await, Some(Reason::INTERNAL_ERROR));
        reloads(&gateway, "config", "ok", 1.0).await;
        let status = gateway.run_command(&["status"]).await.1;
        assert!(status.contains("all.yaml:"), "{status}");

        replace(&file, "gateway: {cluster: east}\nlisteners: 5\n");
        replace(&gateway.file("mesh.yaml"), &with(12).mesh);
        reloads(&gateway, "mesh", "ok", 1.0).await;
        reloads(&gateway, "config", "error", 1.0).await;
        let (_, dump) = gateway.http(15000, "GET", "/config_dump").await;
        assert!(dump.contains(&net.ip(12).to_string()), "{dump}");
        write(gateway.folder.path(), "all.yaml", "");
        reloads(&gateway, "objects", "ok", 1.0).await;
        assert_eq!(reload_counts(&gateway, "error").await, [0.0, 1.0, 0.0, 1.0]);

        replace(&file, &config);
        reloads(&gateway, "config", "ok", 2.0).await;
        let warned = "has no link to `east`";
        replace(&file, &format!("{config}links: [{{from: west, to: north}}]\n"));
        gateway.logged(warned).await;
        replace(&gateway.file("mesh.yaml"), &with(11).mesh);
        reloads(&gateway, "mesh", "ok", 2.0).await;
        replace(&file, &format!("{config}links: [{{from: west, to: south}}]\n"));
        reloads(&gateway, "config", "ok", 4.0).await;
        assert_eq!(gateway.log().matches(warned).count(), 1);
    });
}

#[test]
fn sighup_that_was_ignored_at_the_start_stays_ignored() {
    run(async {
        let net = Net::new();
        let folder = tempfile::tempdir().expect("a folder");
        let script = folder.path().join("nohup-strait");
        let mut settings = Settings::new(net, identities());
        let program = settings.program.display();
        let text = format!("#!/bin/sh\ntrap '' HUP\nexec '{program}' \"$@\"\n");
        std::fs::write(&script, text).expect("a script");
        let executable = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&script, executable).expect("its mode");
        settings.program = script;
        let mut gateway = Gateway::start(&settings).await;
        gateway.signal(Signal::HUP);
        // A reload of another cause follows, so a reload by the signal would have been counted.
        let config = std::fs::read_to_string(gateway.file("strait.yaml")).expect("a file");
        replace(&gateway.file("strait.yaml"), &format!("{config}# changed\n"));
        reloads(&gateway, "config", "ok", 1.0).await;
        assert!(!gateway.log().contains("reading all files again"));
        assert_eq!(reload_counts(&gateway, "ok").await, [0.0, 1.0, 0.0, 0.0]);
        gateway.signal(Signal::TERM);
        assert!(gateway.exited().await.success());
    });
}
