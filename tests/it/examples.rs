//! Stories of `deploy/examples`: gateways with these files, at addresses of the test.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use hickory_resolver::proto::rr::RecordType;
use strait::tools::hbone::{Client, ConnectError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::bindings::{self, Workload, over_udp, question};
use crate::passthrough::{UNRECOGNIZED, answer, client_hello};
use crate::support::process::strait;
use crate::support::{
    CLIENT, ENDPOINT, Endpoint, GATEWAY, Gateway, Net, Settings, echoes, identities, replace, run,
    until,
};
use crate::transit::WEST_GATEWAY;

/// Peer of cluster north.
const PEER: &str = "spiffe://north.local/ns/shop/sa/checkout";
/// Tunnels over which shares are measured.
const TUNNELS: usize = 400;

/// Networks of the gateways, whose addresses replace 127.1.0.0/24 and 127.2.0.0/24 of the files.
#[derive(Clone, Copy)]
struct Networks {
    east: Net,
    west: Net,
}

impl Networks {
    fn new() -> Self {
        Self { east: Net::new(), west: Net::new() }
    }

    fn replace_addresses(self, text: &str) -> String {
        let prefix = |net: Net| net.ip(0).to_string().trim_end_matches('0').to_owned();
        let text = text.replace("127.1.0.", "@EAST@");
        let text = text.replace("127.2.0.", "@WEST@");
        let text = text.replace("@EAST@", &prefix(self.east));
        text.replace("@WEST@", &prefix(self.west))
    }

    /// Copies an example and certificates to a folder, and returns the folder of its files.
    fn copy(self, folder: &Path, example: &str) -> PathBuf {
        let [east, west] = [GATEWAY, WEST_GATEWAY].map(|id| identities().leaf(id));
        let certificates = folder.join("certs");
        std::fs::create_dir_all(&certificates).expect("a folder");
        for (name, text) in [
            ("root.crt", &identities().root),
            ("gateway.crt", &east.chain_pem),
            ("gateway.key", &east.key_pem),
            ("gateway-west.crt", &west.chain_pem),
            ("gateway-west.key", &west.key_pem),
        ] {
            let file = certificates.join(name);
            std::fs::write(&file, text).expect("a file");
            let mode = Permissions::from_mode(0o600);
            std::fs::set_permissions(file, mode).expect("a mode");
        }
        let place = Path::new("deploy/examples").join(example);
        let copy = folder.join(&place);
        std::fs::create_dir_all(&copy).expect("a folder");
        let files = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(place));
        for file in files.expect("an example") {
            let file = file.expect("a file");
            let text = std::fs::read_to_string(file.path()).expect("text");
            let text = self.replace_addresses(&text);
            std::fs::write(copy.join(file.file_name()), text).expect("a file");
        }
        copy
    }

    /// Checks a file of an example, and starts a gateway with it.
    async fn start(self, net: Net, example: &str, file: &str) -> Gateway {
        let folder = tempfile::tempdir().expect("a folder");
        let file = self.copy(folder.path(), example).join(file);
        let checked = strait().args(["check", "-c"]).arg(&file).output().await;
        let checked = checked.expect("an answer");
        assert!(checked.status.success() && checked.stderr.is_empty(), "{checked:?}");
        let settings = Settings::new(net, identities());
        let mut gateway = Gateway::spawn_in(folder, &settings, |command| {
            command.args(["run", "-c"]).arg(file);
        });
        gateway.ready().await;
        gateway
    }

    /// Starts both gateways of an example, that of east first in the result.
    async fn start_both(self, example: &str) -> (Gateway, Gateway) {
        let west = self.start(self.west, example, "west.yaml").await;
        (self.start(self.east, example, "east.yaml").await, west)
    }

    /// Starts the pods of both networks. Pod `HOST` of east sends byte HOST, that of west 100 more.
    async fn pods(self) -> [Endpoint; 4] {
        let pod = async |net: Net, host: u8, name: u8| {
            Endpoint::named(net.listen(host, 15008).await, name)
        };
        [
            pod(self.east, 11, 11).await,
            pod(self.east, 12, 12).await,
            pod(self.west, 11, 111).await,
            pod(self.west, 12, 112).await,
        ]
    }
}

/// Returns the name of the pod that a tunnel reaches.
async fn reached(client: &Client, authority: &str) -> u8 {
    let mut tunnel = client.tunnel(authority).await.expect("a tunnel");
    let name = tunnel.read_u8().await.expect("a name");
    echoes(&mut tunnel).await;
    tunnel.shutdown().await.expect("an open tunnel");
    name
}

/// Counts the tunnels that reach each of these pods.
async fn counts<const N: usize>(client: &Client, authority: &str, pods: [u8; N]) -> [usize; N] {
    let mut counts = [0; N];
    for _ in 0..TUNNELS {
        let name = reached(client, authority).await;
        let place = pods.iter().position(|pod| *pod == name);
        counts[place.unwrap_or_else(|| panic!("pod {name} is none of {pods:?}"))] += 1;
    }
    counts
}

async fn is_rejected(client: &Client, authority: &str) {
    let rejected = client.tunnel(authority).await;
    assert!(matches!(rejected, Err(ConnectError::Status(status)) if status == 503));
}

#[test]
fn one_gateway_serves_ambient_clusters_by_hbone_and_sidecars_by_server_names() {
    run(async {
        let networks = Networks::new();
        let gateway = networks.start(networks.east, "ambient-and-sidecars", "strait.yaml").await;
        let _ambient = Endpoint::echo(networks.east.listen(11, 15008).await);
        let _with_sidecar = Endpoint::echo(networks.east.listen(12, 8080).await);
        let peer = gateway.client(identities()).await;
        let echo = "echo.app.svc.cluster.local:80";
        echoes(&mut peer.tunnel(echo).await.expect("a tunnel")).await;
        let other = CLIENT.replace("/shop/", "/other/");
        is_rejected(&gateway.client_as(identities(), &other).await, echo).await;
        let sidecar = async |service: &str| {
            let name = format!("outbound_.80_._.{service}.app.svc.cluster.local");
            let hello = client_hello(&name, &["istio"]);
            let to = networks.east.address(1, 15443);
            let mut stream = TcpStream::connect(to).await.expect("a connection");
            stream.write_all(&hello).await.expect("a hello");
            stream.shutdown().await.expect("our end");
            (hello, answer(stream).await)
        };
        let (hello, echoed) = sidecar("cart").await;
        assert!(echoed == hello, "the endpoint has the ClientHello as it was");
        assert_eq!(sidecar("echo").await.1, UNRECOGNIZED, "it is for peers of west alone");
        let completed = async || gateway.tunnels("completed").await;
        until("its end", completed, |&count| count == 1.0).await;
    });
}

#[test]
fn the_donor_serves_one_namespace_of_the_acceptor_under_the_agreed_name() {
    run(async {
        let networks = Networks::new();
        let gateway = networks.start(networks.east, "donor", "strait.yaml").await;
        let _pod = Endpoint::echo(networks.east.listen(11, 15008).await);
        let acceptor = gateway.client(identities()).await;
        let mut tunnel = acceptor.tunnel("shop-echo.global:80").await;
        echoes(tunnel.as_mut().expect("a tunnel")).await;
        is_rejected(&acceptor, "ledger.app.svc.cluster.local:80").await;
        for (other, reason) in
            [(CLIENT.replace("/shop/", "/other/").as_str(), "not_for_peer"), (PEER, "not_linked")]
        {
            let client = gateway.client_as(identities(), other).await;
            is_rejected(&client, "shop-echo.global:80").await;
            assert_eq!(gateway.tunnels(reason).await, 1.0, "{other}");
        }
    });
}

#[test]
fn local_clients_of_the_acceptor_reach_the_service_of_the_donor_by_its_name() {
    run(async {
        let networks = Networks::new();
        let workload = Workload::start(networks.east, ENDPOINT, false).await;
        let _donor = networks.start(networks.east, "donor", "strait.yaml").await;
        let acceptor = networks.start(networks.west, "acceptor", "strait.yaml").await;
        let query = question("shop-echo.global", RecordType::A);
        let (_, found) = over_udp(networks.west.address(1, 5353), &query).await;
        assert_eq!(found, [networks.west.ip(2).to_string()]);
        let mut client = bindings::connect(networks.west.address(2, 8080)).await;
        bindings::echoes(&mut client).await;
        drop(client);
        assert_eq!(workload.accepted(), 1);
        let completed = async || acceptor.tunnels("completed").await;
        until("its end", completed, |&count| count == 1.0).await;
    });
}

#[test]
fn the_example_of_split_horizon_gives_each_of_four_pods_a_quarter() {
    run(async {
        let networks = Networks::new();
        let _pods = networks.pods().await;
        let (gateway, _west) = networks.start_both("split-horizon").await;
        let client = gateway.client_as(identities(), PEER).await;
        let pods = [11, 12, 111, 112];
        let counts = counts(&client, "echo.app.global:80", pods).await;
        // Five standard deviations of 100 of 400 are 43.
        let is_near = |count: &usize| (57..=143).contains(count);
        assert!(counts.iter().all(is_near), "{counts:?}");
    });
}

#[test]
fn the_example_of_regions_splits_10_to_90_drains_and_fails_over() {
    run(async {
        let networks = Networks::new();
        let _pods = networks.pods().await;
        let (gateway, _west) = networks.start_both("regions").await;
        let client = gateway.client_as(identities(), PEER).await;
        let search = "search.shop.svc.cluster.local:80";
        let [here, _] = counts(&client, search, [11, 111]).await;
        // Five standard deviations of 40 of 400 are 30.
        assert!((10..=70).contains(&here), "{here} of {TUNNELS} here");

        let drain = ["drain", "region", "us-west"];
        let (code, _, error) = gateway.run_command(&drain).await;
        assert_eq!(code, 0, "{error}");
        assert_eq!(counts(&client, search, [11]).await, [TUNNELS]);
        let undo = gateway.run_command(&[&drain[..], &["--undo"]].concat()).await;
        assert_eq!(undo.0, 0, "{}", undo.2);

        let checkout = "checkout.shop.svc.cluster.local:80";
        assert_eq!(counts(&client, checkout, [12]).await, [TUNNELS]);
        let mesh = gateway.file("deploy/examples/regions/east-mesh.yaml");
        let text = std::fs::read_to_string(&mesh).expect("a mesh");
        let failed = text.replace("status: Healthy", "status: Unhealthy");
        assert_ne!(failed, text);
        replace(&mesh, &failed);
        let name = async || reached(&client, checkout).await;
        until("the passive region", name, |name| *name == 112).await;
        assert_eq!(counts(&client, checkout, [112]).await, [TUNNELS]);
        replace(&mesh, &text);
        until("the active region", name, |name| *name == 12).await;
    });
}
