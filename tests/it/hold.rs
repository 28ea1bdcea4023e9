//! Mass removals by a control plane after a reconnect, which `discovery.hold` keeps back.

use strait::grpc::workload::Address;
use strait::xds::store::ADDRESS;

use crate::istio::{asks, gateway, spawn, spawn_with};
use crate::support::istiod::{Istiod, NAME, Serving};
use crate::support::wds::{SERVICE, bytes, changed, service, workload};
use crate::support::{CLIENT, ECHO, Endpoint, Gateway, Net, Settings, identities, run, until, wds};

fn other_service(index: usize) -> (String, Address) {
    wds::other_service(&format!("s{index}"))
}

/// Returns the name and the body of a workload that serves nothing.
fn other_workload(index: usize) -> (String, Address) {
    let name = format!("w{index}");
    let message = changed(&name, Vec::new(), |one| {
        one.services.clear();
        one.addresses.clear();
    });
    (name, message)
}

/// Control plane at host 2 with the service of the tests, its workload at host 11, and eleven other
/// resources.
struct Mesh {
    net: Net,
    istiod: Istiod,
    others: Vec<(String, Address)>,
    serving: Serving,
    _endpoint: Endpoint,
}

impl Mesh {
    async fn new(net: Net, other: fn(usize) -> (String, Address)) -> Self {
        let istiod = Istiod::default();
        istiod.put(ADDRESS, SERVICE, &service());
        istiod.put(ADDRESS, "a", &workload("a", bytes(net.ip(11))));
        let others: Vec<_> = (0..11).map(other).collect();
        for (name, body) in &others {
            istiod.put(ADDRESS, name, body);
        }
        let serving = istiod.serve(net.address(2, 15012), identities()).await;
        let endpoint = Endpoint::echo(net.listen(11, 15008).await);
        Self { net, istiod, others, serving, _endpoint: endpoint }
    }

    /// Restarts the control plane without the others and these resources. Returns once the gateway
    /// holds their removals.
    async fn lose(mut self, gone: &[&str], gateway: &Gateway) -> Self {
        self.serving.stop().await;
        let others = self.others.iter().map(|(name, _)| name.as_str());
        let gone: Vec<_> = others.chain(gone.iter().copied()).collect();
        gone.iter().for_each(|name| self.istiod.remove(ADDRESS, name));
        self.serving = self.istiod.serve(self.net.address(2, 15012), identities()).await;
        hold(gateway, gone.len()).await;
        self
    }
}

/// Waits until a gateway holds so many removals.
pub async fn hold(gateway: &Gateway, removals: usize) {
    let held = async || gateway.metric("strait_xds_held_removals").await;
    until("the hold", held, |held| held.to_string() == removals.to_string()).await;
}

async fn explain(gateway: &Gateway) -> String {
    let (_, text, error) = gateway.run_command(&["explain", "--from", CLIENT, "--to", ECHO]).await;
    format!("{text}{error}")
}

#[test]
fn a_mass_removal_after_a_reconnect_is_held_until_an_operator_releases_it() {
    run(async {
        let mesh = Mesh::new(Net::new(), other_service).await;
        let mut gateway = gateway(mesh.net, NAME);
        gateway.ready().await;
        asks(&gateway).await.expect("a tunnel");
        assert_eq!(gateway.run_command(&["release"]).await.0, 1, "nothing is held");
        let text = explain(&gateway).await;
        assert!(text.contains("opened") && !text.contains("discovery.hold"), "{text}");

        let _mesh = mesh.lose(&["a", SERVICE], &gateway).await;
        asks(&gateway).await.expect("it serves what it had");
        assert_eq!(gateway.readiness().await.0, 200);
        let (_, status, _) = gateway.run_command(&["status"]).await;
        let problem = "13 removals by the control plane (services: 12, workloads: 1, clusters: 0)";
        assert!(status.contains(problem), "{status}");
        let text = explain(&gateway).await;
        let kept = format!("{SERVICE}, a: removed by the control plane, kept by `discovery.hold`");
        assert!(text.contains("opened") && text.contains(&kept), "{text}");
        gateway.logged("the removals are held").await;

        let (code, text, _) = gateway.run_command(&["release"]).await;
        assert_eq!((code, &*text), (0, "13 removals by the control plane are applied\n"));
        let requested = async || asks(&gateway).await;
        until("a refusal", requested, Result::is_err).await.expect_err("a refusal");
        let (_, status, _) = gateway.run_command(&["status"]).await;
        assert!(!status.contains("are held"), "{status}");
        assert_eq!(gateway.metric("strait_xds_held_removals").await, 0.0);
    });
}

#[test]
fn most_workloads_do_not_go_while_their_services_stay() {
    run(async {
        let mesh = Mesh::new(Net::new(), other_workload).await;
        let mut gateway = gateway(mesh.net, NAME);
        gateway.ready().await;
        asks(&gateway).await.expect("a tunnel");
        let _mesh = mesh.lose(&["a"], &gateway).await;
        asks(&gateway).await.expect("it serves what it had");
        let (_, status, _) = gateway.run_command(&["status"]).await;
        let problem = "12 removals by the control plane (services: 0, workloads: 12, clusters: 0)";
        assert!(status.contains(problem), "{status}");
        let text = explain(&gateway).await;
        assert!(text.contains("a: removed by the control plane, kept by"), "{text}");
    });
}

#[test]
fn a_process_that_holds_removals_is_replaced_by_one_that_has_them_from_the_cache() {
    run(async {
        for has_cache in [false, true] {
            let mesh = Mesh::new(Net::new(), other_service).await;
            let folder = tempfile::tempdir().unwrap();
            let mut settings = Settings::new(mesh.net, identities());
            settings.take_over = Some(folder.path().join("take-over"));
            let file = folder.path().join("state");
            let cache =
                if has_cache { format!(", cache: {}", file.display()) } else { String::new() };
            let discovery = format!("{NAME}{cache}");
            let mut first = spawn(&settings, &discovery);
            first.ready().await;
            let is_saved = async || file.exists() == has_cache;
            until("the cache", is_saved, |&is_saved| is_saved).await;
            let _mesh = mesh.lose(&["a", SERVICE], &first).await;

            let mut second = spawn(&settings, &discovery);
            if !has_cache {
                assert!(!second.exited().await.success());
                let why = "removals by the control plane are held, and there is no";
                assert!(second.log().contains(why), "{}", second.log());
                first.logged("this one goes on").await;
                asks(&first).await.expect("it serves what it had");
                first.run_command(&["release"]).await;
                second = spawn(&settings, &discovery);
            }
            second.logged("took over from the process that served").await;
            hold(&second, if has_cache { 13 } else { 0 }).await;
            assert_eq!(asks(&second).await.is_ok(), has_cache);
            assert!(first.exited().await.success());
        }
    });
}

#[test]
fn a_process_whose_cache_cannot_be_written_keeps_what_it_holds() {
    run(async {
        let mesh = Mesh::new(Net::new(), other_service).await;
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        std::fs::create_dir(&state).expect("a folder");
        let mut settings = Settings::new(mesh.net, identities());
        settings.take_over = Some(folder.path().join("take-over"));
        let discovery = format!("{NAME}, cache: {}", state.join("file").display());
        let mut first = spawn(&settings, &discovery);
        first.ready().await;
        let is_saved = async || state.join("file").exists();
        until("the cache", is_saved, |&is_saved| is_saved).await;
        let elsewhere = folder.path().join("elsewhere");
        std::fs::rename(&state, &elsewhere).expect("another name");
        let (name, body) = other_workload(99);
        mesh.istiod.put(ADDRESS, &name, &body);
        first.logged("cannot save the state").await;
        let _mesh = mesh.lose(&["a", SERVICE], &first).await;

        let discovery = format!("{NAME}, cache: {}", elsewhere.join("file").display());
        let mut second = spawn(&settings, &discovery);
        assert!(!second.exited().await.success());
        let log = second.log();
        assert!(log.contains("are held, and the last write of `discovery.cache` failed"), "{log}");
        asks(&first).await.expect("it serves what it had");
    });
}

#[test]
fn a_successor_that_is_ready_during_a_hold_is_refused_before_it_accepts() {
    run(async {
        let mesh = Mesh::new(Net::new(), other_service).await;
        let folder = tempfile::tempdir().unwrap();
        let mut settings = Settings::new(mesh.net, identities());
        settings.take_over = Some(folder.path().join("take-over"));
        let mut first = spawn(&settings, NAME);
        first.ready().await;
        let [now, later] = [2, 3].map(|host| mesh.net.address(host, 15012));
        let mut second = spawn_with(&settings, NAME, |folder| {
            let file = folder.join("strait.yaml");
            let text = std::fs::read_to_string(&file).expect("a configuration");
            let text = text.replace(&now.to_string(), &later.to_string());
            std::fs::write(file, text).expect("a configuration");
        });
        second.logged("no stream to the control plane").await;
        let mesh = mesh.lose(&["a", SERVICE], &first).await;
        // Something to send to the next process. The rest stays held.
        mesh.istiod.put(ADDRESS, SERVICE, &service());
        let _later = mesh.istiod.serve(later, identities()).await;
        assert!(!second.exited().await.success());
        let log = second.log();
        assert!(log.contains("removals by the control plane are held"), "{log}");
        assert!(!log.contains("listener opened"), "{log}");
        asks(&first).await.expect("it serves what it had");
    });
}
