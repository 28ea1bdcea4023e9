//! Objects of other projects as entries of the configuration: each kind in a running gateway, and
//! its reload.

use std::fmt::Write as _;

use strait::tls::{self, TrustedDomain};
use strait::tools::hbone::{self, Client, IncomingTunnel};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::bindings;
use crate::reload::reloads;
use crate::scope::{started, write};
use crate::support::{
    ECHO, Endpoint, Gateway, Net, Settings, broken, echoes, endpoint_port, identities, replace,
    run, until,
};
use crate::transit::{WEST_GATEWAY, start_west, west};

const WORKLOAD: &str = "spiffe://west.local/ns/app/sa/echo";

/// Returns an object with this `spec`.
fn object(version: &str, kind: &str, spec: &str) -> String {
    format!("apiVersion: {version}\nkind: {kind}\nmetadata: {{name: a, namespace: app}}\n{spec}\n")
}

/// Waits until the objects are applied for this many times without a mistake.
async fn reloaded(gateway: &Gateway, result: &str, times: f64) {
    let name = format!("strait_reload_total{{what=\"objects\",result=\"{result}\"}}");
    let count = async || gateway.metric(&name).await;
    until("the reload", count, |&count| count >= times).await;
}

#[test]
fn a_policy_of_exposition_opens_a_service_and_its_reload_closes_it() {
    run(async {
        let net = Net::new();
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        settings.exposure = "    []\n  files: [objects]\n".to_owned();
        let policy = |rest: &str| {
            let spec = format!("spec: {{exposed: [{{name: echo, port: 80, {rest}}}]}}");
            object("multicluster.istio.io/v1alpha1", "ServiceExpositionPolicy", &spec)
        };
        let open = policy("alias: shared-echo.global, clusters: [west]");
        let gateway = started(&settings, &open).await;
        let _endpoint = Endpoint::echo(net.listen(11, endpoint_port()).await);
        let client = gateway.client(identities()).await;
        let mut by_name = client.tunnel(ECHO).await.expect("a tunnel");
        let mut by_alias = client.tunnel("shared-echo.global:80").await.expect("a tunnel");
        echoes(&mut by_name).await;
        echoes(&mut by_alias).await;
        let (_, page, _) =
            gateway.run_command(&["explain", "--from", WORKLOAD, "--to", ECHO]).await;
        assert!(page.contains("objects/all.yaml:4): cluster west"), "{page}");
        // A service of another cluster's peers, then a part that cannot be expressed.
        write(gateway.folder.path(), "all.yaml", &policy("clusters: [east]"));
        broken(&mut by_name).await;
        broken(&mut by_alias).await;
        client.tunnel(ECHO).await.expect_err("no tunnel");
        write(gateway.folder.path(), "all.yaml", &open);
        reloaded(&gateway, "ok", 2.0).await;
        let mut again = client.tunnel(ECHO).await.expect("a tunnel");
        echoes(&mut again).await;
        write(gateway.folder.path(), "all.yaml", &policy("clusters: [west], subset: v1"));
        broken(&mut again).await;
        gateway.logged("`spec.exposed[].subset` exposes a part of a service").await;
        client.tunnel(ECHO).await.expect_err("no tunnel");
    });
}

/// Starts an HBONE workload at host 11 that echoes.
async fn workload(net: Net) -> JoinSet<()> {
    let leaf = identities().leaf(WORKLOAD);
    let east = TrustedDomain { name: "east.local".into(), issuers: None, roots: None };
    let tls = tls::endpoint_server_config(&identities().material(&leaf), vec![east]);
    let listener = net.listen(11, 15008).await;
    let mut task = JoinSet::new();
    task.spawn(hbone::serve(listener, tls.expect("a server"), |incoming| async {
        let IncomingTunnel { authority, tunnel } = incoming;
        assert_eq!(authority, "echo.global:8080");
        let (mut read, mut write) = tokio::io::split(tunnel);
        let _ = tokio::io::copy(&mut read, &mut write).await;
    }));
    task
}

#[test]
fn a_remote_service_binding_opens_a_listener_and_its_removal_closes_it() {
    run(async {
        let (here, there) = (Net::new(), Net::new());
        let _workload = workload(there).await;
        let mut donor = west(there, &[(11, 1, "HBONE")]);
        donor.exposure = donor.exposure.replace("echo.global:80", "echo.global:8080");
        let _donor = start_west(&donor).await;
        let mut settings = Settings::new(here, identities());
        let listen = here.address(2, 8080);
        let keys = format!("  bindings: {{addresses: {}/32}}\n", listen.ip());
        settings.exposure = format!("    []\n  files: [objects]\n{keys}");
        let _ = writeln!(
            settings.more,
            "networks: [{{name: west, cluster: west, identities: [\"{WEST_GATEWAY}\"], gateways: \
             [\"{}:15008\"]}}]",
            there.ip(1)
        );
        let spec = "spec: {remote: [{cluster: west, services: [{name: echo.global, alias: echo, \
                    port: 8080}]}]}";
        let binding = object("multicluster.istio.io/v1alpha1", "RemoteServiceBinding", spec);
        // Nothing listens until the file has the object.
        let acceptor = started(&settings, "").await;
        TcpStream::connect(listen).await.expect_err("no listener");
        write(acceptor.folder.path(), "all.yaml", &binding);
        reloaded(&acceptor, "ok", 1.0).await;
        let connected = async || TcpStream::connect(listen).await;
        let mut stream = until("a listener", connected, Result::is_ok).await.expect("a stream");
        bindings::echoes(&mut stream).await;
        write(acceptor.folder.path(), "all.yaml", "");
        let _ = until("no listener", connected, Result::is_err).await;
    });
}

/// Returns the mesh with its two workloads in these regions.
fn in_regions(mesh: &str, regions: [&str; 2]) -> String {
    let mut regions = regions.into_iter();
    let lines = mesh.lines().map(|line| {
        if !line.contains("capacity: 1") {
            return line.to_owned();
        }
        let region = regions.next().expect("two workloads");
        let located = format!("locality: {{region: {region}}}, capacity");
        line.replace("capacity", &located)
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Returns a policy with these weights of us-east and us-west.
fn policy(east: u8, west: u8) -> String {
    let spec = format!(
        "spec: {{policy: [{{dns: echo.global, lbType: 1, target: [{{region: us-east/*, \
         weight: {east}}}, {{region: us-west, weight: {west}}}]}}]}}"
    );
    object("admiral.io/v1alpha1", "GlobalTrafficPolicy", &spec)
}

/// Gateway of a service with a pod in us-east, one in us-west, and a policy for both regions.
struct TwoRegions {
    /// Mesh without regions.
    mesh: String,
    gateway: Gateway,
    client: Client,
    east: Endpoint,
    west: Endpoint,
}

impl TwoRegions {
    async fn start(policy: &str) -> Self {
        let net = Net::new();
        let mut settings =
            Settings::new(net, identities()).endpoints(&[(11, 1, "TCP"), (12, 1, "TCP")]);
        let mesh = std::mem::take(&mut settings.mesh);
        settings.mesh = in_regions(&mesh, ["us-east", "us-west"]);
        settings.exposure += "  files: [objects]\n";
        let gateway = started(&settings, policy).await;
        Self {
            client: gateway.client(identities()).await,
            east: Endpoint::echo(net.listen(11, endpoint_port()).await),
            west: Endpoint::echo(net.listen(12, endpoint_port()).await),
            mesh,
            gateway,
        }
    }

    fn move_to(&self, regions: [&str; 2]) {
        let mesh = in_regions(&self.mesh, regions);
        replace(&self.gateway.file("mesh.yaml"), &mesh);
    }

    /// Opens tunnels, and returns how many each pod gets.
    async fn open(&self, count: usize) -> [usize; 2] {
        let accepted = || [&self.east, &self.west].map(Endpoint::accepted);
        let before = accepted();
        for _ in 0..count {
            echoes(&mut self.client.tunnel(ECHO).await.expect("a tunnel")).await;
        }
        let after = accepted();
        [after[0] - before[0], after[1] - before[1]]
    }
}

#[test]
fn a_policy_whose_regions_leave_the_mesh_is_ignored_until_they_are_back() {
    run(async {
        let regions = TwoRegions::start(&policy(0, 100)).await;
        let gateway = &regions.gateway;
        assert_eq!(regions.open(1).await, [0, 1]);
        regions.move_to(["eu", "eu"]);
        reloaded(gateway, "error", 1.0).await;
        gateway.logged("no workload of ").await;
        // Not `no_endpoint`: the policy would leave none.
        regions.open(1).await;
        // Another mesh that the policy does not fit repeats no error.
        regions.move_to(["eu", "ap"]);
        reloads(gateway, "mesh", "ok", 2.0).await;
        let errors = "strait_reload_total{what=\"objects\",result=\"error\"}";
        assert!(gateway.metric(errors).await < 1.5);
        regions.move_to(["us-east", "us-west"]);
        reloaded(gateway, "ok", 1.0).await;
        assert_eq!(regions.open(20).await, [0, 20]);
    });
}

#[test]
fn a_mesh_is_compared_with_the_policies_in_use_while_their_files_are_unusable() {
    run(async {
        let regions = TwoRegions::start(&policy(0, 100)).await;
        let gateway = &regions.gateway;
        assert_eq!(regions.open(1).await, [0, 1]);
        write(gateway.folder.path(), "all.yaml", "kind: [\n");
        reloaded(gateway, "error", 1.0).await;
        regions.move_to(["eu", "eu"]);
        reloads(gateway, "mesh", "ok", 1.0).await;
        regions.open(1).await;
        gateway.logged("no workload of ").await;
        write(gateway.folder.path(), "all.yaml", "");
        reloaded(gateway, "ok", 1.0).await;
        regions.open(1).await;
    });
}

#[test]
fn a_binding_of_an_object_whose_port_is_in_use_opens_after_a_change_of_the_mesh() {
    run(is_opened_by("mesh.yaml"));
}

#[test]
fn a_binding_of_an_object_whose_port_is_in_use_opens_after_a_change_of_the_certificate() {
    run(is_opened_by("gateway.crt"));
}

/// Asserts that a binding whose port is in use stops no start, and opens after a change of a file.
async fn is_opened_by(file: &str) {
    let net = Net::new();
    let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
    let listen = net.address(2, 8080);
    let _ = write!(
        settings.exposure,
        "  files: [objects]\n  bindings: {{addresses: {}/32}}\n",
        listen.ip()
    );
    let spec = "spec: {remote: [{cluster: west, services: [{name: pay.global, port: 8080}]}]}";
    let binding = object("multicluster.istio.io/v1alpha1", "RemoteServiceBinding", spec);
    let taken = net.listen(2, 8080).await;
    let gateway = started(&settings, &binding).await;
    let _endpoint = Endpoint::echo(net.listen(11, endpoint_port()).await);
    let client = gateway.client(identities()).await;
    echoes(&mut client.tunnel(ECHO).await.expect("a tunnel")).await;
    gateway.logged("listener `binding pay.global:8080` is not open").await;
    assert!(gateway.metric("strait_reload_total{what=\"objects\",result=\"error\"}").await > 0.5);
    drop(taken);
    let file = gateway.file(file);
    let text = std::fs::read_to_string(&file).expect("a file");
    replace(&file, &format!("{text}\n"));
    let connected = async || TcpStream::connect(listen).await;
    let _ = until("a listener", connected, Result::is_ok).await;
    reloaded(&gateway, "ok", 1.0).await;
}

#[test]
fn a_global_traffic_policy_sets_the_weights_of_regions() {
    run(async {
        let regions = TwoRegions::start(&policy(100, 0)).await;
        assert_eq!(regions.open(20).await, [20, 0]);
        write(regions.gateway.folder.path(), "all.yaml", &policy(0, 100));
        reloaded(&regions.gateway, "ok", 1.0).await;
        assert_eq!(regions.open(20).await, [0, 20]);
    });
}
