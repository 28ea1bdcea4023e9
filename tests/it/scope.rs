//! Scope of exposure: services that objects export or keep, and linked clusters.

use std::fmt::Write as _;
use std::path::Path;

use h2::Reason;
use strait::tools::hbone::Client;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::support::{
    CLIENT, ECHO, Endpoint, Gateway, Net, Settings, broken, echoes, identities, replace, run, until,
};

const EAST: &str = "spiffe://east.local/ns/shop/sa/checkout";

/// Hosts of the endpoint of this cluster, and of two of the other cluster. The second of those is
/// in its own network.
const LOCAL: u8 = 11;
const REMOTE: u8 = 12;
const FAR: u8 = 13;

/// An endpoint that sends its own name and then echoes.
pub fn named(listener: TcpListener, name: u8) -> Endpoint {
    Endpoint::new(listener, move |mut stream| async move {
        let _ = stream.write_u8(name).await;
        let (mut read, mut write) = stream.split();
        let _ = tokio::io::copy(&mut read, &mut write).await;
    })
}

/// Returns the endpoints that answer under a name; empty if it is rejected.
pub async fn answering(client: &Client, authority: &str) -> Vec<u8> {
    let mut names = Vec::new();
    // With two of equal weight, one is missed once in half a million runs.
    for _ in 0..20 {
        let Ok(mut tunnel) = client.tunnel(authority).await else {
            return Vec::new();
        };
        names.push(tunnel.read_u8().await.expect("a name"));
    }
    names.sort_unstable();
    names.dedup();
    names
}

/// A Service of a cluster with one endpoint, which is in a network.
fn service(name: &str, labels: &str, (cluster, network): (&str, &str), address: &str) -> String {
    let of = format!("topology.istio.io/cluster: {cluster}");
    format!(
        "---
apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: app, labels: {{{of}, {labels}}}}}
spec: {{ports: [{{name: tcp, port: 80}}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: {name}-{cluster}
  namespace: app
  labels: {{{of}, kubernetes.io/service-name: {name}, topology.istio.io/network: {network}}}
addressType: IPv4
ports: [{{name: tcp, port: 9000}}]
endpoints: [{{addresses: [{address}]}}]
"
    )
}

/// Returns settings that expose nothing in `strait.yaml`, except by objects in the folder
/// `objects`.
pub fn settings(net: Net, exposure: &str) -> Settings<'static> {
    let mut settings = Settings::new(net, identities());
    settings.exposure = format!("    []\n  files: [objects]\n{exposure}");
    settings
}

pub fn write(folder: &Path, name: &str, text: &str) {
    let objects = folder.join("objects");
    std::fs::create_dir_all(&objects).expect("a folder");
    replace(&objects.join(name), text);
}

pub async fn started(settings: &Settings<'_>, objects: &str) -> Gateway {
    let mut gateway = Gateway::spawn(settings, |folder| write(folder, "all.yaml", objects));
    gateway.ready().await;
    gateway
}

#[test]
fn s4_six_row_scope_table() {
    const GLOBAL: &str = "solo.io/service-scope: global";
    // Service of this cluster, Service of the other, and the endpoints under the global name.
    type Row = (Option<&'static str>, Option<&'static str>, &'static [u8]);
    let rows: [Row; 6] = [
        (Some(""), Some(""), &[]),
        (None, Some(GLOBAL), &[REMOTE]),
        (Some(""), Some(GLOBAL), &[REMOTE]),
        (Some(GLOBAL), Some(GLOBAL), &[LOCAL, REMOTE]),
        (Some(GLOBAL), None, &[LOCAL]),
        (Some(GLOBAL), Some(""), &[LOCAL]),
    ];
    run(async {
        let net = Net::new();
        let mut text = String::new();
        for (index, (local, remote, _)) in rows.iter().enumerate() {
            for (name, network, host) in [("near", "east", REMOTE), ("far", "west", FAR)] {
                let name = format!("{name}{index}");
                if let Some(labels) = local {
                    let place = ("east", "east");
                    text += &service(&name, labels, place, &net.ip(LOCAL).to_string());
                }
                if let Some(labels) = remote {
                    let place = ("west", network);
                    text += &service(&name, labels, place, &net.ip(host).to_string());
                }
            }
        }
        let gateway = started(&settings(net, ""), &text).await;
        let mut endpoints = Vec::new();
        for host in [LOCAL, REMOTE, FAR] {
            endpoints.push(named(net.listen(host, 9000).await, host));
        }
        let client = gateway.client(identities()).await;
        for (index, (local, _, want)) in rows.iter().enumerate() {
            let row = index + 1;
            let answers = async |name: &str, suffix: &str| {
                answering(&client, &format!("{name}{index}.app.{suffix}:80")).await
            };
            let far: Vec<u8> = want.iter().copied().filter(|host| *host == LOCAL).collect();
            assert_eq!(answers("near", "mesh.internal").await, *want, "row {row}");
            assert_eq!(answers("far", "mesh.internal").await, far, "row {row}");
            // The Service's own name belongs to this cluster's endpoints, and is exported only if
            // the Service is. Without such a Service, it is another name of the global one.
            let own: &[u8] = match local {
                None => want,
                Some(label) if *label == GLOBAL => &[LOCAL],
                Some(_) => &[],
            };
            assert_eq!(answers("near", "svc.cluster.local").await, own, "row {row}");
        }
        assert_eq!(endpoints[2].accepted(), 0, "another network is never dialled");
        // The status shows it anyway.
        let (_, shown, _) = gateway.run_command(&["status", "far3.app.mesh.internal"]).await;
        assert!(shown.contains("the workload is in network west"), "{shown}");
    });
}

/// Two clusters, alpha and beta, each with a gateway that has the same links.
async fn two_clusters(nets: [Net; 2], links: &str) -> [Gateway; 2] {
    let mut gateways = Vec::new();
    for (net, own) in nets.into_iter().zip(["alpha", "beta"]) {
        let mut settings = Settings::new(net, identities()).endpoints(&[(LOCAL, 1, "TCP")]);
        settings.exposure = format!("    - {{service: \"{ECHO}\", to: [{{anyone: true}}]}}\n");
        let _ = writeln!(settings.more, "links: [{links}]");
        let mut gateway = Gateway::spawn(&settings, |folder| {
            let file = folder.join("strait.yaml");
            let text = std::fs::read_to_string(&file).expect("a configuration");
            let text = text
                .replace("gateway: {cluster: east", &format!("gateway: {{cluster: {own}"))
                .replace("cluster: east}", "cluster: beta}")
                .replace("cluster: west}", "cluster: alpha}");
            std::fs::write(file, text).expect("a configuration");
        });
        gateway.ready().await;
        gateways.push(gateway);
    }
    gateways.try_into().ok().expect("two gateways")
}

async fn refusal(client: &Client, authority: &str) -> String {
    let refused = client.tunnel(authority).await;
    refused.map(drop).expect_err("a refusal").to_string()
}

#[test]
fn alpha_reaches_beta_and_beta_is_refused_by_alpha() {
    run(async {
        let nets = [Net::new(), Net::new()];
        let [alpha, beta] = two_clusters(nets, "{from: alpha, to: beta}").await;
        let _endpoints = [
            Endpoint::echo(nets[0].listen(LOCAL, 9000).await),
            Endpoint::echo(nets[1].listen(LOCAL, 9000).await),
        ];
        let from_alpha = beta.client_as(identities(), CLIENT).await;
        let mut tunnel = from_alpha.tunnel(ECHO).await.expect("alpha reaches beta");
        echoes(&mut tunnel).await;
        let from_beta = alpha.client_as(identities(), EAST).await;
        let refused = refusal(&from_beta, ECHO).await;
        assert_eq!(refused, refusal(&from_beta, "unknown.app.svc.cluster.local:80").await);
        assert_eq!(alpha.tunnels("not_linked").await, 1.0);
        alpha.logged("reason=\"not_linked\"").await;
        for (gateway, own) in [(&alpha, CLIENT), (&beta, EAST)] {
            let client = gateway.client_as(identities(), own).await;
            client.tunnel(ECHO).await.expect("its own cluster needs no link");
        }

        // Changes of links apply to open tunnels too.
        let file = beta.file("strait.yaml");
        let config = std::fs::read_to_string(&file).expect("a configuration");
        let turned = config.replace("{from: alpha, to: beta}", "{from: beta, to: alpha}");
        assert_ne!(config, turned);
        replace(&file, &turned);
        assert_eq!(broken(&mut tunnel).await, Some(Reason::INTERNAL_ERROR));
        assert_eq!(refusal(&from_alpha, ECHO).await, refused);
        replace(&file, &config);
        let again = async || from_alpha.tunnel(ECHO).await.is_ok();
        until("the link", again, |&is_linked| is_linked).await;
    });
}

#[test]
fn objects_apply_live_and_bad_ones_not_at_all() {
    run(async {
        let net = Net::new();
        let echo =
            |label: &str| service("echo", label, ("east", "east"), &net.ip(LOCAL).to_string());
        let auto = "  auto: [{services: {matchLabels: {tier: web}}}]\n";
        let gateway = started(&settings(net, auto), &echo("")).await;
        let folder = gateway.folder.path();
        let _endpoint = Endpoint::echo(net.listen(LOCAL, 9000).await);
        let client = gateway.client(identities()).await;
        assert!(client.tunnel(ECHO).await.is_err(), "nobody exports it");
        let is_open = async |want: bool| {
            let open = async || client.tunnel(ECHO).await.is_ok();
            until("the export", open, |&open| open == want).await;
        };

        let export = "apiVersion: multicluster.x-k8s.io/v1beta1\nkind: ServiceExport\n\
                      metadata: {name: echo, namespace: app}\n";
        write(folder, "export.yml", export);
        is_open(true).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
        echoes(&mut tunnel).await;
        write(folder, "bad.json", "{\"apiVersion\": \"v1\",\n\"kind\": [5]}");
        gateway.logged("bad.json:2: error: `object.kind`").await;
        std::fs::remove_file(folder.join("objects/bad.json")).expect("no bad file");
        echoes(&mut tunnel).await;
        std::fs::remove_file(folder.join("objects/export.yml")).expect("no export");
        assert_eq!(broken(&mut tunnel).await, Some(Reason::INTERNAL_ERROR));
        is_open(false).await;

        write(folder, "all.yaml", &echo("tier: web"));
        is_open(true).await;
        write(folder, "all.yaml", &echo("tier: web, istio.io/global: \"false\""));
        is_open(false).await;
        let file = gateway.file("strait.yaml");
        let config = std::fs::read_to_string(&file).expect("a configuration");
        replace(&file, &config.replace("default: none", "default: all"));
        gateway.logged("what=\"config\"").await;
        is_open(false).await;
        let reason = async || gateway.tunnels("not_exposed").await;
        until("why", reason, |&count| count >= 3.0).await;
        write(folder, "all.yaml", &echo(""));
        is_open(true).await;
        let entry = format!("services:\n    - {{service: \"{ECHO}\", to: [{{cluster: east}}]}}\n");
        let narrowed = config.replace("services:\n    []\n", &entry);
        assert_ne!(narrowed, config);
        replace(&file, &narrowed);
        is_open(false).await;
        let east = gateway.client_as(identities(), EAST).await;
        east.tunnel(ECHO).await.expect("whom the entry names");
        let count = gateway.metric("strait_reload_total{what=\"objects\",result=\"error\"}");
        assert_eq!(count.await, 1.0, "{}", gateway.log());
    });
}
