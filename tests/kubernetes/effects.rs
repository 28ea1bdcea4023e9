//! Objects that come, change and go: each kind has its effect within a second.

use std::fmt::Debug;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value as Json, json};
use strait::tools::hbone::Client;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

use crate::server::{Cluster, Server};
use crate::support::{ECHO, Endpoint, Gateway, Net, Settings, identities, run};
use crate::tests::{
    ANY, LIVE, answer, binding, cluster, judged, policy, ports, service, settings, slice,
    spawn_with, started,
};

const HOST: &str = "echo.app.svc.cluster.local";
/// Pages of the admin port.
const DUMP: &str = "/config_dump";
const STATUS: &str = "/status";

/// Interval of the polls for an effect.
const POLL: Duration = Duration::from_millis(20);
/// Polls within a second, the limit from a change to its effect. Other load of the machine delays
/// them as it delays the gateway.
const POLLS_MAX: u32 = 50;

/// Polls until the answer is as wanted, [`POLLS_MAX`] times at most.
async fn soon<T: Debug>(what: &str, mut ask: impl AsyncFnMut() -> T, wanted: impl Fn(&T) -> bool) {
    let start = Instant::now();
    for _ in 0..POLLS_MAX {
        if wanted(&ask().await) {
            return;
        }
        // deadline: the state of another process can only be polled.
        sleep(POLL).await;
    }
    panic!("{what}: no effect after {:?}, last seen {:?}", start.elapsed(), ask().await);
}

async fn answers(client: &Client, wanted: Option<u8>) {
    soon("the endpoint", async || answer(client, ECHO).await, |answer| *answer == wanted).await;
}

/// Waits until a page has a text, or has it not.
async fn shown(gateway: &Gateway, page: &str, text: &str, wanted: bool) {
    let has = async || gateway.http(15000, "GET", page).await.1.contains(text);
    soon(text, has, |has| *has == wanted).await;
}

/// Waits until a listener is open, or is not.
async fn listens(address: SocketAddr, wanted: bool) {
    let connected = async || TcpStream::connect(address).await.is_ok();
    soon("the listener", connected, |found| *found == wanted).await;
}

#[test]
fn each_kind_applies_when_it_is_created_changed_and_removed() {
    run(async {
        let net = Net::new();
        let cluster = Cluster::new();
        let server = Server::start(&cluster, ANY).await;
        let _first = Endpoint::named(net.listen(11, 9000).await, 11);
        let _second = Endpoint::named(net.listen(12, 9000).await, 12);
        let gateway = started(net, &server).await;
        let client = gateway.client(identities()).await;
        answers(&client, None).await;
        cluster.put("Service", "echo", service());
        cluster.put("EndpointSlice", "echo-1", slice(net, 11));
        cluster.put("ServiceExport", "echo", json!({}));
        answers(&client, Some(11)).await;
        cluster.put("EndpointSlice", "echo-1", slice(net, 12));
        answers(&client, Some(12)).await;
        cluster.remove("EndpointSlice", "echo-1");
        answers(&client, None).await;
        cluster.put("EndpointSlice", "echo-2", slice(net, 11));
        answers(&client, Some(11)).await;
        let local = json!({"istio.io/global": "false"});
        cluster.put("Service", "echo", json!({"labels": local, "spec": {"ports": ports(80)}}));
        answers(&client, None).await;
        cluster.put("Service", "echo", service());
        answers(&client, Some(11)).await;
        cluster.remove("Service", "echo");
        answers(&client, None).await;
        cluster.put("Service", "echo", service());
        answers(&client, Some(11)).await;
        cluster.put("ServiceExpositionPolicy", "echo", policy("east"));
        answers(&client, None).await;
        cluster.put("ServiceExpositionPolicy", "echo", policy("west"));
        answers(&client, Some(11)).await;
        cluster.remove("ServiceExport", "echo");
        answers(&client, Some(11)).await;
        cluster.remove("ServiceExpositionPolicy", "echo");
        answers(&client, None).await;
    });
}

#[test]
fn imports_distributions_and_bindings_of_objects_come_and_go() {
    run(async {
        let net = Net::new();
        let cluster = cluster(net, 11);
        let server = Server::start(&cluster, ANY).await;
        let gateway = started(net, &server).await;
        let import = |ip: &str| json!({"spec": {"ips": [ip], "ports": ports(80)}});
        cluster.put("ServiceImport", "echo", import("240.9.8.7"));
        shown(&gateway, DUMP, "240.9.8.7", true).await;
        cluster.put("ServiceImport", "echo", import("240.9.8.6"));
        shown(&gateway, DUMP, "240.9.8.6", true).await;
        cluster.remove("ServiceImport", "echo");
        shown(&gateway, DUMP, "240.9.8.6", false).await;
        // No endpoint would be left, as none is in the region: the policy is refused.
        let target = json!([{"region": "us-west-2/*", "weight": 10}]);
        let refused = json!([{"dns": HOST, "lbType": 1, "target": target}]);
        let accepted = json!([{"dns": HOST, "lbType": 0}]);
        for (rules, is_refused) in [(&refused, true), (&accepted, false), (&refused, true)] {
            cluster.put("GlobalTrafficPolicy", "echo", json!({"spec": {"policy": rules}}));
            shown(&gateway, STATUS, "GlobalTrafficPolicy app/echo", is_refused).await;
        }
        cluster.remove("GlobalTrafficPolicy", "echo");
        shown(&gateway, STATUS, "GlobalTrafficPolicy app/echo", false).await;
        let listen = net.address(2, 8080);
        TcpStream::connect(listen).await.expect_err("no listener");
        cluster.put("RemoteServiceBinding", "far", binding(8080));
        listens(listen, true).await;
        cluster.put("RemoteServiceBinding", "far", binding(8081));
        listens(net.address(2, 8081), true).await;
        listens(listen, false).await;
        cluster.remove("RemoteServiceBinding", "far");
        listens(net.address(2, 8081), false).await;
    });
}

#[test]
fn the_labels_of_a_namespace_decide_how_its_endpoints_are_dialled() {
    run(async {
        let net = Net::new();
        let cluster = cluster(net, 11);
        let server = Server::start(&cluster, ANY).await;
        let _by_tcp = Endpoint::named(net.listen(11, 9000).await, 11);
        let _by_hbone = Endpoint::named(net.listen(11, 15008).await, 12);
        let gateway = started(net, &server).await;
        let client = gateway.client(identities()).await;
        answers(&client, Some(11)).await;
        let mode = |mode: &str| json!({"labels": {"istio.io/dataplane-mode": mode}});
        cluster.put("Namespace", "app", mode("ambient"));
        answers(&client, Some(12)).await;
        cluster.put("Namespace", "app", mode("none"));
        answers(&client, Some(11)).await;
        cluster.put("Namespace", "app", mode("ambient"));
        answers(&client, Some(12)).await;
        cluster.remove("Namespace", "app");
        answers(&client, Some(11)).await;
    });
}

#[test]
fn namespaces_share_an_address_while_it_is_that_of_a_node() {
    run(async {
        let net = Net::new();
        let cluster = cluster(net, 11);
        // Neither namespace has evidence for the address as a whole.
        let mut other = slice(net, 11);
        other["ports"] = ports(9001);
        cluster.put("EndpointSlice", "other/echo-1", other);
        let server = Server::start(&cluster, ANY).await;
        let _endpoint = Endpoint::named(net.listen(11, 9000).await, 11);
        let gateway = started(net, &server).await;
        let client = gateway.client(identities()).await;
        answers(&client, None).await;
        let node = |host: u8| {
            let address = json!({"type": "InternalIP", "address": net.ip(host)});
            json!({"status": {"addresses": [address]}})
        };
        for (host, wanted) in [(11, Some(11)), (12, None), (11, Some(11))] {
            cluster.put("Node", "one", node(host));
            answers(&client, wanted).await;
        }
        cluster.remove("Node", "one");
        answers(&client, None).await;
    });
}

/// A pod of the identity `orders`.
fn source(phase: &str) -> Json {
    json!({
        "labels": {"identity": "orders"}, "spec": {},
        "status": {"phase": phase, "podIPs": [{"ip": "10.0.0.9"}]},
    })
}

/// Settings in which the Dependency objects of the namespace of the tests count.
fn with_dependencies(net: Net) -> Settings<'static> {
    let mut settings = settings(net);
    settings.exposure += "  dependencies: app\n";
    settings
}

#[test]
fn a_dependency_opens_a_binding_only_while_its_source_has_a_pod_here() {
    run(async {
        let net = Net::new();
        let cluster = cluster(net, 11);
        let server = Server::start(&cluster, ANY).await;
        let mut gateway = spawn_with(&with_dependencies(net), server.address, LIVE);
        gateway.ready().await;
        let listens = async |wanted: bool| listens(net.address(2, 8080), wanted).await;
        let dependency = |of: Json| json!({"spec": {"source": "orders", "destinations": of}});
        cluster.put("RemoteServiceBinding", "far", binding(8080));
        listens(true).await;
        cluster.put("Dependency", "orders", dependency(json!(["far"])));
        listens(false).await;
        let rule = "Dependency app/orders limits it to clusters with a pod that has the label \
                    `identity: orders`";
        judged(&cluster, ("RemoteServiceBinding", "far"), ("False", "NoEffect", rule)).await;
        judged(&cluster, ("Dependency", "orders"), ("True", "Accepted", "")).await;
        let (code, _, error) = gateway.run_command(&["explain", "--binding", "far.global"]).await;
        assert!(code != 0 && error.contains(rule), "{error}");
        cluster.put("Pod", "orders-1", source("Running"));
        listens(true).await;
        judged(&cluster, ("RemoteServiceBinding", "far"), ("True", "Accepted", "")).await;
        cluster.put("Pod", "orders-1", source("Succeeded"));
        listens(false).await;
        cluster.put("Dependency", "orders", dependency(json!(["near"])));
        listens(true).await;
        // Its destinations cannot be read, so they may be any.
        cluster.put("Dependency", "orders", dependency(json!("near")));
        listens(false).await;
        judged(&cluster, ("Dependency", "orders"), ("False", "Invalid", "destinations")).await;
        cluster.remove("Dependency", "orders");
        listens(true).await;
    });
}

#[test]
fn a_dependency_leaves_out_the_endpoints_of_other_clusters() {
    run(async {
        let net = Net::new();
        let cluster = Cluster::new();
        let server = Server::start(&cluster, ANY).await;
        let _remote = Endpoint::named(net.listen(12, 9000).await, 12);
        let mut gateway = spawn_with(&with_dependencies(net), server.address, LIVE);
        gateway.ready().await;
        let client = gateway.client(identities()).await;
        let to = "echo.app.svc.clusterset.local:80";
        let answer = async |wanted: Option<u8>| {
            soon("the endpoint", async || answer(&client, to).await, |found| *found == wanted)
                .await;
        };
        let mut copy = slice(net, 12);
        copy["labels"] = json!({
            "multicluster.kubernetes.io/source-cluster": "west",
            "multicluster.kubernetes.io/service-name": "echo",
            "topology.istio.io/network": "east",
        });
        cluster.put("EndpointSlice", "west-echo", copy);
        let labels = json!({"identity": "payments"});
        let spec = json!({"ips": [], "ports": ports(80)});
        cluster.put("ServiceImport", "echo", json!({"labels": labels, "spec": spec}));
        answer(Some(12)).await;
        let depends = json!({"source": "orders", "destinations": ["payments"]});
        cluster.put("Dependency", "orders", json!({"spec": depends}));
        answer(None).await;
        let rule = "it is not used from other clusters: Dependency app/orders limits it";
        let peer = "spiffe://west.local/ns/shop/sa/checkout";
        let (_, page, _) = gateway.run_command(&["explain", "--from", peer, "--to", to]).await;
        assert!(page.contains(rule), "{page}");
        shown(&gateway, STATUS, "Dependency app/orders limits it", true).await;
        cluster.put("Pod", "orders-1", source("Running"));
        answer(Some(12)).await;
        cluster.remove("Pod", "orders-1");
        answer(None).await;
        cluster.remove("Dependency", "orders");
        answer(Some(12)).await;
    });
}
