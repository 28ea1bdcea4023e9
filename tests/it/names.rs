//! Names besides hostnames: families of suffixes, aliases by consumer and by region, VIPs of this
//! network, and workload addresses.

use h2::Reason;
use strait::tools::hbone::{Client, Tunnel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::passthrough::client_hello;
use crate::support::{
    CLIENT, Endpoint, Gateway, Net, Settings, broken, identities, replace, run, until,
};

/// Client of cluster north, which has its own trust domain.
const NORTH: &str = "spiffe://north.local/ns/shop/sa/reports";
const WEST2: &str = "foo.uswest2.svc.cluster.local";
const EAST2: &str = "foo.useast2.svc.cluster.local";

/// Admiral's payments example: one service in two regions, in namespaces of different names, on one
/// network. Another service has no further name, and another network has its VIP and address too.
fn mesh(net: Net) -> String {
    let mut text = format!(
        "services:
  - {{name: foo, namespace: uswest2, hostname: {WEST2}, vips: [], ports: {{80: 0}}}}
  - {{name: foo, namespace: useast2, hostname: {EAST2}, vips: [], ports: {{80: 0}}}}
  - {{name: bar, namespace: app, hostname: bar.app.svc.cluster.local,
     vips: [west/240.0.0.9], ports: {{80: 0}}}}
  - {{name: echo, namespace: app, hostname: echo.app.mesh.internal,
     vips: [east/240.0.0.9], ports: {{80: 0}}}}
workloads:
"
    );
    for (host, network, region, service) in [
        (11, "east", "us-west-2", format!("uswest2/{WEST2}")),
        (12, "east", "us-east-2", format!("useast2/{EAST2}")),
        (13, "east", "us-east-2", "app/echo.app.mesh.internal".to_owned()),
        (13, "west", "us-east-2", "app/bar.app.svc.cluster.local".to_owned()),
    ] {
        let ip = net.ip(host);
        text += &format!(
            "  - {{uid: \"{network}/{ip}\", name: \"pod-{ip}\", namespace: app,
     serviceAccount: echo, trustDomain: east.local, clusterId: {network}, network: {network},
     workloadIps: [\"{ip}\"], protocol: TCP, locality: {{region: {region}}},
     services: {{{service}: {{80: 9000}}}}}}\n"
        );
    }
    text + "policies:
  - name: no-reports
    namespace: app
    scope: Namespace
    action: Deny
    rules: [[[{principals: [{Exact: north.local/ns/shop/sa/reports}],
      destinationIps: [\"IP\"]}]]]\n"
        .replace("IP", &format!("{}/32", net.ip(13)))
        .as_str()
}

const NAMES: &str = "names:
  aliases:
    - {name: \"foo.global:80\", to: [foo.uswest2.global, foo.useast2.mesh.internal]}
    - {name: \"foo-west.global:80\", to: [foo.uswest2.global, foo.useast2.global],
       region: us-west-2}
    - {name: \"orders.global:80\", to: foo.uswest2.global, consumers: [west]}
    - {name: \"orders.global:80\", to: foo.useast2.global, consumers: [north]}
    - {name: \"hidden.global:80\", to: foo.uswest2.global, consumers: [west]}
";

/// Gateway of this mesh, and its endpoints, each of which sends its number and then echoes.
struct World {
    gateway: Gateway,
    net: Net,
    _endpoints: [Endpoint; 3],
}

impl World {
    async fn start(names: &str, workloads: bool, policy: &str) -> Self {
        let net = Net::new();
        let mut settings = Settings::new(net, identities());
        settings.mesh = mesh(net);
        let entry = |host: &str| {
            format!(
                "    - {{service: {host}, workloads: {workloads}, to: [{{cluster: west}}, \
                 {{cluster: north}}]}}\n"
            )
        };
        // By any name of its family.
        let hosts = ["foo.uswest2.mesh.internal", EAST2, "echo.app.global"];
        settings.exposure = hosts.map(entry).concat();
        let ip = net.ip(1);
        settings.listeners =
            format!("  - {{name: sni, bind: \"{ip}:15443\", protocol: tls, routing: istio}}\n");
        settings.more += names;
        settings.more += policy;
        let mut gateway = Gateway::spawn(&settings, |folder| {
            let file = folder.join("strait.yaml");
            let text = std::fs::read_to_string(&file).expect("a configuration");
            let west = "    - {name: west.local, cluster: west}\n";
            let north = west.replace("west", "north");
            assert!(text.contains(west));
            let text = text.replace(west, &format!("{west}{north}"));
            std::fs::write(&file, text).expect("a configuration");
        });
        gateway.ready().await;
        let endpoint = async |host| {
            Endpoint::new(net.listen(host, 9000).await, move |mut stream| async move {
                let _ = stream.write_u8(host).await;
                let (mut read, mut write) = stream.split();
                let _ = tokio::io::copy(&mut read, &mut write).await;
            })
        };
        Self {
            gateway,
            net,
            _endpoints: [endpoint(11).await, endpoint(12).await, endpoint(13).await],
        }
    }

    async fn client(&self, id: &str) -> Client {
        self.gateway.client_as(identities(), id).await
    }

    /// Changes the configuration while it runs.
    fn change(&self, from: &str, to: &str) {
        let file = self.gateway.file("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a configuration");
        assert!(text.contains(from), "{from}");
        replace(&file, &text.replace(from, to));
    }
}

/// Returns the endpoint that answers, and the tunnel; or the kind of rejection.
async fn open_tunnel(client: &Client, authority: &str) -> Result<(u8, Tunnel), String> {
    let tunnel = client.tunnel(authority).await;
    let mut tunnel = tunnel.map_err(|error| error.to_string())?;
    let name = tunnel.read_u8().await.expect("a number");
    Ok((name, tunnel))
}

/// Returns all endpoints that answer. With this many tunnels, one of two is missed with a
/// probability of 2 in 2^24.
async fn who(client: &Client, authority: &str) -> Vec<u8> {
    let mut seen = Vec::new();
    for _ in 0..24 {
        seen.push(open_tunnel(client, authority).await.expect("a tunnel").0);
    }
    seen.sort_unstable();
    seen.dedup();
    seen
}

#[test]
fn one_service_answers_under_all_its_names_and_a_vip_is_that_of_this_network() {
    run(async {
        let world = World::start("", false, "").await;
        let client = world.client(CLIENT).await;
        for name in [
            "echo.app.mesh.internal:80",
            "echo.app.svc.cluster.local:80",
            "echo.app.svc.clusterset.local:80",
            "ECHO.app.global.:80",
            "240.0.0.9:80",
        ] {
            let (who, _) = open_tunnel(&client, name).await.expect("a tunnel");
            assert_eq!(who, 13, "{name}");
        }
        for name in ["echo.app.global:81", "echo.app.other:80", "echo.app:80", "echo.global:80"] {
            let refused = open_tunnel(&client, name).await.map(|(who, _)| who);
            assert!(refused.is_err(), "{name}: {refused:?}");
        }
        assert_eq!(world.gateway.tunnels("unknown_service").await, 4.0);
    });
}

#[test]
fn payments_in_two_regions_have_one_name_and_a_name_for_a_region() {
    run(async {
        let world = World::start(NAMES, false, "").await;
        let client = world.client(CLIENT).await;
        assert_eq!(who(&client, "foo.global:80").await, [11, 12]);
        assert_eq!(who(&client, "foo-west.global:80").await, [11]);
        // Each consumer gets its own view.
        assert_eq!(who(&client, "orders.global:80").await, [11]);
        let north = world.client(NORTH).await;
        assert_eq!(who(&north, "orders.global:80").await, [12]);
        assert_eq!(who(&north, "foo.global:80").await, [11, 12]);
        // The service in the log and in metrics is the requested one, and not a hostname.
        world.gateway.logged("foo-west.global:80@us-west-2").await;
    });
}

#[test]
fn an_alias_visible_to_one_consumer_is_an_unknown_service_to_another() {
    run(async {
        let world = World::start(NAMES, false, "").await;
        let (west, north) = (world.client(CLIENT).await, world.client(NORTH).await);
        assert_eq!(open_tunnel(&west, "hidden.global:80").await.expect("a tunnel").0, 11);
        let refused = async |name| open_tunnel(&north, name).await.map(|(who, _)| who);
        let hidden = refused("hidden.global:80").await.expect_err("a refusal");
        for name in ["nothing.global:80", "bar.app.svc.cluster.local:80"] {
            assert_eq!(refused(name).await, Err(hidden.clone()), "{name}");
        }
        assert_eq!(world.gateway.tunnels("unknown_service").await, 2.0);
        assert_eq!(world.gateway.tunnels("not_exposed").await, 1.0);
    });
}

#[test]
fn server_names_are_looked_up_as_authorities_are_and_see_what_everybody_sees() {
    run(async {
        let world = World::start(NAMES, false, "").await;
        // Their peers have no identity, and reach services that are exposed to anyone.
        world.change("to: [{cluster: west}, {cluster: north}]", "to: [{anyone: true}]");
        let answer = async |name: &str| {
            let address = world.net.address(1, 15443);
            let mut stream = TcpStream::connect(address).await.expect("a connection");
            let name = format!("outbound_.80_._.{name}");
            let hello = client_hello(&name, &["istio"]);
            stream.write_all(&hello).await.expect("a hello");
            // An alert is a record of type 21, and no endpoint has that number.
            stream.read_u8().await.expect("an answer")
        };
        let open = async || answer("echo.app.mesh.internal").await;
        until("what is open", open, |&who| who == 13).await;
        for (name, who) in [
            ("echo.app.svc.clusterset.local", 13),
            ("foo.uswest2.global", 11),
            ("foo-west.global", 11),
            // The consumer is unknown.
            ("hidden.global", 21),
            ("orders.global", 21),
            ("nothing.global", 21),
        ] {
            assert_eq!(answer(name).await, who, "{name}");
        }
        let unknown = async || world.gateway.tunnels("unknown_service").await;
        until("three refusals", unknown, |&count| count == 3.0).await;
    });
}

#[test]
fn an_alias_of_two_services_opens_neither_to_whom_one_is_not_exposed() {
    run(async {
        let world = World::start(NAMES, false, "").await;
        let west = world.client(CLIENT).await;
        let (_, mut tunnel) = open_tunnel(&west, "foo.global:80").await.expect("a tunnel");
        let entry = format!("    - {{service: {EAST2}, workloads: false, to: [{{cluster: west}}, ");
        world.change(&entry, &entry.replace("west}}, ", "north}}, "));
        world.change(&entry, &entry.replace("{cluster: west}, ", ""));
        assert_eq!(broken(&mut tunnel).await, Some(Reason::INTERNAL_ERROR));
        assert!(open_tunnel(&west, "foo.global:80").await.is_err());
        assert_eq!(world.gateway.tunnels("not_for_peer").await, 1.0);
        assert_eq!(who(&west, "foo.uswest2.global:80").await, [11]);
    });
}

#[test]
fn a_workload_is_reached_at_its_target_port_where_its_service_says_so() {
    run(async {
        let policy = "policy: {istio: enforce}\n";
        let world = World::start("", true, policy).await;
        let (west, north) = (world.client(CLIENT).await, world.client(NORTH).await);
        let at = |host, port: u16| world.net.address(host, port).to_string();
        for host in [11, 12, 13] {
            let (who, _) = open_tunnel(&west, &at(host, 9000)).await.expect("a tunnel");
            assert_eq!(who, host);
        }
        // Its policies reject the same peer as by the name of its service.
        for name in [&*at(13, 9000), "echo.app.mesh.internal:80"] {
            let refused = open_tunnel(&north, name).await.map(|(who, _)| who);
            assert!(refused.expect_err("a refusal").contains("401"), "{name}");
        }
        assert_eq!(world.gateway.tunnels("policy_denied").await, 2.0);
        // Rejected: the port of its service, another port of its own, and another host.
        for name in [at(11, 80), at(11, 15008), at(14, 9000)] {
            assert!(open_tunnel(&west, &name).await.is_err(), "{name}");
        }
        assert_eq!(world.gateway.tunnels("unknown_service").await, 3.0);
        let (_, mut tunnel) = open_tunnel(&west, &at(11, 9000)).await.expect("a tunnel");
        let (_, mut by_name) = open_tunnel(&west, "foo.uswest2.global:80").await.expect("a tunnel");
        world.change("workloads: true", "workloads: false");
        assert_eq!(broken(&mut tunnel).await, Some(Reason::INTERNAL_ERROR));
        assert!(open_tunnel(&west, &at(11, 9000)).await.is_err());
        by_name.write_all(b"?").await.expect("an open tunnel");
        assert_eq!(by_name.read_u8().await.expect("an open tunnel"), b'?');
    });
}

#[test]
fn names_change_while_it_runs_and_a_tunnel_whose_name_leads_elsewhere_ends() {
    run(async {
        let world = World::start(NAMES, false, "").await;
        let client = world.client(CLIENT).await;
        let (_, mut moved) = open_tunnel(&client, "orders.global:80").await.expect("a tunnel");
        let (_, mut pinned) = open_tunnel(&client, "foo-west.global:80").await.expect("a tunnel");
        let (_, mut family) =
            open_tunnel(&client, "foo.uswest2.global:80").await.expect("a tunnel");
        let (_, mut kept) = open_tunnel(&client, "hidden.global:80").await.expect("a tunnel");
        let changed = NAMES
            .replacen("to: foo.uswest2.global", "to: foo.useast2.svc.clusterset.local", 1)
            .replace("region: us-west-2", "region: us-east-2");
        world.change(NAMES, &changed);
        let reset = Some(Reason::INTERNAL_ERROR);
        assert_eq!(broken(&mut moved).await, reset);
        assert_eq!(broken(&mut pinned).await, reset);
        assert_eq!(who(&client, "orders.global:80").await, [12]);
        assert_eq!(who(&client, "foo-west.global:80").await, [12]);
        for tunnel in [&mut family, &mut kept] {
            tunnel.write_all(b"?").await.expect("an open tunnel");
            assert_eq!(tunnel.read_u8().await.expect("an open tunnel"), b'?');
        }
        // Another family, which replaces the first.
        let suffixes = "names: {suffixes: [svc.cluster.local, mesh.internal, example.net]}\n";
        world.change(&changed, suffixes);
        assert_eq!(broken(&mut family).await, reset);
        assert_eq!(broken(&mut kept).await, reset);
        assert_eq!(who(&client, "foo.uswest2.example.net:80").await, [11]);
        assert!(open_tunnel(&client, "orders.global:80").await.is_err());
        let revoked = async || world.gateway.tunnels("revoked").await;
        until("the ends", revoked, |&count| count == 4.0).await;
    });
}

#[test]
fn an_open_tunnel_by_a_name_that_is_given_to_others_ends() {
    run(async {
        let world = World::start(NAMES, false, "").await;
        // No namespace owner may claim this name.
        let file = world.gateway.file("mesh.yaml");
        let mesh = std::fs::read_to_string(&file).expect("a mesh");
        replace(&file, &mesh.replace(WEST2, "api.example"));
        world.change("default: none", "default: all");
        let client = world.client(CLIENT).await;
        let answers = async || open_tunnel(&client, "api.example:80").await.is_ok();
        until("the service", answers, |is_there| *is_there).await;
        let (_, mut lost) = open_tunnel(&client, "api.example:80").await.expect("a tunnel");
        let (_, mut kept) = open_tunnel(&client, "foo.useast2.global:80").await.expect("a tunnel");
        let alias =
            format!("{NAMES}    - {{name: api.example, to: {EAST2}, consumers: [north]}}\n");
        world.change(NAMES, &alias);
        assert_eq!(broken(&mut lost).await, Some(Reason::INTERNAL_ERROR));
        assert!(open_tunnel(&client, "api.example:80").await.is_err());
        kept.write_all(b"?").await.expect("an open tunnel");
        assert_eq!(kept.read_u8().await.expect("an open tunnel"), b'?');
    });
}
