//! An API server that is slow, away or forgets; objects that are held, invalid or judged.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use serde_json::{Value as Json, json};
use strait::tools::hbone::Client;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

use crate::server::{Cluster, Server};
use crate::support::{
    CLIENT, ECHO, Endpoint, Gateway, Net, Settings, identities, replace, run, until,
};

/// Any free port.
pub const ANY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Time in which a gateway that may ask a control plane would do so.
const SHORT: Duration = Duration::from_millis(500);

pub fn ports(number: u16) -> Json {
    json!([{"name": "tcp", "port": number}])
}

pub fn service() -> Json {
    json!({"spec": {"ports": ports(80)}})
}

pub fn slice(net: Net, host: u8) -> Json {
    let labels = json!({"kubernetes.io/service-name": "echo"});
    let endpoints = json!([{"addresses": [net.ip(host)]}]);
    json!({
        "labels": labels, "addressType": "IPv4", "ports": ports(9000), "endpoints": endpoints,
    })
}

pub fn policy(cluster: &str) -> Json {
    json!({"spec": {"exposed": [{"name": "echo", "clusters": [cluster]}]}})
}

pub fn binding(port: u16) -> Json {
    let services = json!([{"name": "far.global", "alias": "far", "port": port}]);
    json!({"spec": {"remote": [{"cluster": "west", "services": services}]}})
}

/// A cluster that exports a service with an endpoint.
pub fn cluster(net: Net, host: u8) -> Cluster {
    let cluster = Cluster::new();
    cluster.put("Service", "echo", service());
    cluster.put("EndpointSlice", "echo-1", slice(net, host));
    cluster.put("ServiceExport", "echo", json!({}));
    cluster
}

/// Discovery of the tests.
pub const LIVE: &str = "discovery: {kind: kubernetes, kubeconfig: kubeconfig}";

pub fn settings(net: Net) -> Settings<'static> {
    let mut settings = Settings::new(net, identities());
    let bindings = format!("  bindings: {{addresses: {}/32}}\n", net.ip(2));
    settings.exposure = format!("    []\n{bindings}");
    let networks = "networks: [{name: west, cluster: west, gateways: [\"127.0.0.1:1\"]}]\n";
    settings.more += networks;
    settings
}

/// Starts a gateway with a server as the source of its mesh.
fn spawn(net: Net, server: &Server) -> Gateway {
    spawn_with(&settings(net), server.address, LIVE)
}

/// Starts a gateway with this discovery, and a kubeconfig for a server.
pub fn spawn_with(settings: &Settings<'_>, server: SocketAddr, discovery: &str) -> Gateway {
    Gateway::spawn(settings, |folder| {
        let file = folder.join("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a configuration");
        replace(&file, &text.replace("discovery: {kind: file, path: mesh.yaml}", discovery));
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "stub",
            "clusters": [{"name": "stub", "cluster": {
                "server": format!("http://{server}"),
            }}],
            "users": [{"name": "stub", "user": {}}],
            "contexts": [{"name": "stub", "context": {"cluster": "stub", "user": "stub"}}],
        });
        replace(&folder.join("kubeconfig"), &kubeconfig.to_string());
    })
}

pub async fn started(net: Net, server: &Server) -> Gateway {
    let mut gateway = spawn(net, server);
    gateway.ready().await;
    gateway
}

/// Returns the name of the endpoint at which a tunnel ends, if it is not rejected.
pub async fn answer(client: &Client, authority: &str) -> Option<u8> {
    client.tunnel(authority).await.ok()?.read_u8().await.ok()
}

/// Waits until tunnels to the service end at this endpoint, or are rejected.
async fn answers(client: &Client, wanted: Option<u8>) {
    until("the endpoint", async || answer(client, ECHO).await, |answer| *answer == wanted).await;
}

/// Waits until an object has a condition with this status, reason and text.
pub async fn judged(cluster: &Cluster, object: (&str, &str), wanted: (&str, &str, &str)) {
    let condition = async || cluster.condition(object.0, object.1);
    let (status, reason, text) = wanted;
    let is_wanted = |found: &Option<(String, String, String)>| {
        found.as_ref().is_some_and(|(of, why, message)| {
            of == status && why == reason && message.contains(text)
        })
    };
    until(reason, condition, is_wanted).await;
}

/// Waits until the status has a text, or has it not.
async fn shown(gateway: &Gateway, text: &str, wanted: bool) {
    let status = async || gateway.http(15000, "GET", "/status").await.1.contains(text);
    until(text, status, |has| *has == wanted).await;
}

#[test]
fn an_api_server_that_goes_leaves_the_last_state_until_it_is_back() {
    run(async {
        let net = Net::new();
        let cluster = cluster(net, 11);
        let server = Server::start(&cluster, ANY).await;
        let _first = Endpoint::named(net.listen(11, 9000).await, 11);
        let _second = Endpoint::named(net.listen(12, 9000).await, 12);
        let gateway = started(net, &server).await;
        let client = gateway.client(identities()).await;
        answers(&client, Some(11)).await;
        let address = server.address;
        drop(server);
        gateway.logged("cannot be watched: ").await;
        cluster.put("EndpointSlice", "echo-1", slice(net, 12));
        answers(&client, Some(11)).await;
        assert_eq!(gateway.readiness().await.0, 200);
        let _server = Server::start(&cluster, address).await;
        answers(&client, Some(12)).await;
    });
}

#[test]
fn a_start_without_the_api_server_serves_the_cached_objects_until_it_is_back() {
    run(async {
        let net = Net::new();
        let cluster = cluster(net, 11);
        let server = Server::start(&cluster, ANY).await;
        let _endpoint = Endpoint::named(net.listen(11, 9000).await, 11);
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("objects");
        let keys = format!("kubeconfig: kubeconfig, cache: {}", file.display());
        let discovery = format!("discovery: {{kind: kubernetes, {keys}}}");
        let mut gateway = spawn_with(&settings(net), server.address, &discovery);
        gateway.ready().await;
        until("the file", async || file.exists(), |exists| *exists).await;
        gateway.kill().await;
        let address = server.address;
        drop(server);

        let mut gateway = spawn_with(&settings(net), address, &discovery);
        gateway.ready().await;
        let client = gateway.client(identities()).await;
        answers(&client, Some(11)).await;
        let notice = "the API server has not listed every kind yet; serving those of ";
        shown(&gateway, notice, true).await;
        cluster.remove("ServiceExport", "echo");
        let server = Server::start(&cluster, address).await;
        answers(&client, None).await;
        shown(&gateway, notice, false).await;
        gateway.kill().await;
        drop(server);

        // Beside a control plane: it is asked, since the objects that restrict it are known.
        let plane = net.listen(13, 15012).await;
        let mut settings = Settings::new(net, identities());
        settings.exposure = format!("    []\n  kubernetes: {{{keys}}}\n");
        let plane_address = net.address(13, 15012);
        let discovery =
            format!("discovery: {{kind: istio, address: \"{plane_address}\", roots: SYSTEM}}");
        let _gateway = spawn_with(&settings, address, &discovery);
        let asked = async || tokio::time::timeout(SHORT, plane.accept()).await.is_ok();
        until("the control plane", asked, |asked| *asked).await;
    });
}

#[test]
fn forgotten_changes_are_listed_again() {
    run(async {
        let net = Net::new();
        let cluster = cluster(net, 11);
        let server = Server::start(&cluster, ANY).await;
        let _second = Endpoint::named(net.listen(12, 9000).await, 12);
        let gateway = started(net, &server).await;
        let client = gateway.client(identities()).await;
        let lists = cluster.lists();
        cluster.forget(|cluster| {
            cluster.remove("EndpointSlice", "echo-1");
            cluster.put("EndpointSlice", "echo-2", slice(net, 12));
        });
        answers(&client, Some(12)).await;
        assert!(cluster.lists() > lists);
    });
}

/// Log message about a hold of objects.
const HELD: &str = "far fewer objects; the removals are held";

/// Names of Services beside `echo`: enough for a hold.
fn others() -> impl Iterator<Item = String> {
    (0..12).map(|number| format!("other-{number}"))
}

fn put_others(cluster: &Cluster) {
    others().for_each(|name| cluster.put("Service", &name, service()));
}

/// Removes all Services and the export in one list, which is held.
fn remove_most(cluster: &Cluster) {
    cluster.forget(|cluster| {
        others().for_each(|name| cluster.remove("Service", &name));
        cluster.remove("Service", "echo");
        cluster.remove("ServiceExport", "echo");
    });
}

#[test]
fn a_list_of_far_fewer_objects_is_held_until_an_operator_releases_it() {
    run(async {
        let net = Net::new();
        let cluster = cluster(net, 11);
        put_others(&cluster);
        let server = Server::start(&cluster, ANY).await;
        let _first = Endpoint::named(net.listen(11, 9000).await, 11);
        let folder = tempfile::tempdir().expect("a folder");
        let mut settings = settings(net);
        settings.take_over = Some(folder.path().join("take-over"));
        let mut gateway = spawn_with(&settings, server.address, LIVE);
        gateway.ready().await;
        let client = gateway.client(identities()).await;
        answers(&client, Some(11)).await;
        remove_most(&cluster);
        gateway.logged(HELD).await;
        answers(&client, Some(11)).await;
        shown(&gateway, "14 removals by the API server are held", true).await;
        assert_eq!(gateway.metric("strait_xds_held_removals").await, 14.0);
        let question = ["explain", "--from", CLIENT, "--to", ECHO];
        let (_, text, _) = gateway.run_command(&question).await;
        assert!(text.contains("removed by the API server, kept by `discovery.hold`"), "{text}");

        let mut next = spawn_with(&settings, server.address, LIVE);
        assert!(!next.exited().await.success(), "it would start with what is listed now");
        assert!(next.log().contains("removals by the API server are held"), "{}", next.log());

        let (code, text, _) = gateway.run_command(&["release"]).await;
        assert_eq!((code, &*text), (0, "14 removals by the API server are applied\n"));
        answers(&client, None).await;
        shown(&gateway, "are held", false).await;
        assert_eq!(gateway.metric("strait_xds_held_removals").await, 0.0);
    });
}

#[test]
fn a_process_that_holds_removals_of_objects_is_replaced_by_one_with_a_cache() {
    run(async {
        let net = Net::new();
        let cluster = cluster(net, 11);
        put_others(&cluster);
        let server = Server::start(&cluster, ANY).await;
        let _endpoint = Endpoint::named(net.listen(11, 9000).await, 11);
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("objects");
        let discovery = format!(
            "discovery: {{kind: kubernetes, kubeconfig: kubeconfig, cache: {}}}",
            file.display()
        );
        let mut settings = settings(net);
        settings.take_over = Some(folder.path().join("take-over"));
        let mut gateway = spawn_with(&settings, server.address, &discovery);
        gateway.ready().await;
        until("the file", async || file.exists(), |exists| *exists).await;
        remove_most(&cluster);
        gateway.logged(HELD).await;
        let next = spawn_with(&settings, server.address, &discovery);
        next.logged("took over from the process that served").await;
        next.logged(HELD).await;
        answers(&next.client(identities()).await, Some(11)).await;
    });
}

#[test]
fn a_gateway_is_ready_once_a_slow_api_server_has_listed_everything() {
    run(async {
        let net = Net::new();
        let cluster = cluster(net, 11);
        for number in 0..10_000_u16 {
            let name = format!("other-{number}");
            cluster.put("Service", &name, service());
            let [high, low] = number.to_be_bytes();
            let mut slice = slice(net, 11);
            slice["labels"] = json!({"kubernetes.io/service-name": &name});
            slice["endpoints"] = json!([{"addresses": [Ipv4Addr::new(10, 0, high, low)]}]);
            cluster.put("EndpointSlice", &name, slice);
        }
        cluster.set_slow(true);
        let server = Server::start(&cluster, ANY).await;
        let _first = Endpoint::named(net.listen(11, 9000).await, 11);
        let mut gateway = spawn(net, &server);
        let readiness = async || gateway.readiness().await;
        let waits = |(status, why): &(u16, String)| *status == 500 && why.contains("discovery");
        until("readiness", readiness, waits).await;
        cluster.set_slow(false);
        gateway.ready().await;
        answers(&gateway.client(identities()).await, Some(11)).await;
        assert!(cluster.lists() > 70, "pages");
    });
}

#[test]
fn missing_kinds_and_invalid_objects_are_reported_and_open_nothing() {
    run(async {
        let net = Net::new();
        let cluster = cluster(net, 11);
        cluster.set_missing(&["GlobalTrafficPolicy", "RemoteServiceBinding"]);
        let server = Server::start(&cluster, ANY).await;
        let _first = Endpoint::named(net.listen(11, 9000).await, 11);
        let gateway = started(net, &server).await;
        let client = gateway.client(identities()).await;
        gateway.logged("has no RemoteServiceBinding, GlobalTrafficPolicy").await;
        answers(&client, Some(11)).await;
        let exposed = json!([{"name": "echo", "clusters": ["west"], "subset": "v1"}]);
        cluster.put("ServiceExpositionPolicy", "bad", json!({"spec": {"exposed": exposed}}));
        answers(&client, None).await;
        gateway.logged("ServiceExpositionPolicy app/bad: error: `spec.exposed[].subset`").await;
        cluster.remove("ServiceExpositionPolicy", "bad");
        answers(&client, Some(11)).await;
        cluster.put("RemoteServiceBinding", "far", binding(8080));
        cluster.set_missing(&[]);
        let connected = async || TcpStream::connect(net.address(2, 8080)).await;
        let _ = until("a listener", connected, Result::is_ok).await;
    });
}

#[test]
fn objects_get_conditions_with_what_check_would_print() {
    run(async {
        let net = Net::new();
        let cluster = cluster(net, 11);
        let server = Server::start(&cluster, ANY).await;
        let _gateway = started(net, &server).await;
        let export = ("ServiceExport", "echo");
        judged(&cluster, export, ("True", "Accepted", "")).await;
        cluster.remove("Service", "echo");
        judged(&cluster, export, ("False", "NoEffect", "no such Service")).await;
        cluster.put("Service", "echo", service());
        judged(&cluster, export, ("True", "Accepted", "")).await;
        let exposed = json!([{"name": "echo", "clusters": ["west"], "subset": "v1"}]);
        cluster.put("ServiceExpositionPolicy", "bad", json!({"spec": {"exposed": exposed}}));
        let bad = ("ServiceExpositionPolicy", "bad");
        judged(&cluster, bad, ("False", "Invalid", "`spec.exposed[].subset`")).await;
        cluster.put("ServiceExpositionPolicy", "unknown", policy("nowhere"));
        let unknown = ("ServiceExpositionPolicy", "unknown");
        judged(&cluster, unknown, ("False", "Refused", "nowhere is not a cluster")).await;
        assert_eq!(cluster.condition("Service", "echo"), None);
    });
}

#[test]
fn a_binding_whose_port_is_in_use_is_not_accepted_until_it_is_open() {
    run(async {
        let net = Net::new();
        let cluster = cluster(net, 11);
        let server = Server::start(&cluster, ANY).await;
        let _gateway = started(net, &server).await;
        let taken = net.listen(2, 8080).await;
        cluster.put("RemoteServiceBinding", "far", binding(8080));
        let far = ("RemoteServiceBinding", "far");
        let why = format!("cannot listen on {}", net.address(2, 8080));
        judged(&cluster, far, ("False", "PortUnavailable", &why)).await;
        drop(taken);
        judged(&cluster, far, ("True", "Accepted", "")).await;
    });
}

#[test]
fn objects_restrict_what_a_control_plane_exports_before_it_is_asked() {
    run(async {
        let net = Net::new();
        let cluster = cluster(net, 11);
        cluster.set_slow(true);
        let server = Server::start(&cluster, ANY).await;
        let plane = net.listen(13, 15012).await;
        let asked = async || tokio::time::timeout(SHORT, plane.accept()).await.is_ok();
        let mut settings = Settings::new(net, identities());
        settings.exposure = "    []\n  kubernetes: {kubeconfig: kubeconfig}\n".to_owned();
        let address = net.address(13, 15012);
        let discovery =
            format!("discovery: {{kind: istio, address: \"{address}\", roots: SYSTEM}}");
        let gateway = spawn_with(&settings, server.address, &discovery);
        let readiness = async || gateway.readiness().await;
        let waits = |(status, why): &(u16, String)| *status == 500 && why.contains("objects");
        until("readiness", readiness, waits).await;
        assert!(!asked().await, "asked before the objects are known");
        cluster.set_slow(false);
        until("the control plane", asked, |asked| *asked).await;
        let objects = |(_, why): &(u16, String)| !why.contains("objects");
        until("readiness", readiness, objects).await;
    });
}
