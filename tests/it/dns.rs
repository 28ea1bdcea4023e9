//! Endpoints with hostnames that are resolved while the gateway runs.

use std::time::Duration;

use strait::tools::hbone::Client;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, sleep};

use crate::support::dns::{Answer, DnsServer, NXDOMAIN, SERVFAIL};
use crate::support::{ECHO, Endpoint, Gateway, Net, Settings, identities, run, until};

/// Limit of the time from new addresses to tunnels that reach them.
const RECOVERY: Duration = Duration::from_secs(5);

fn settings(net: Net) -> Settings<'static> {
    let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
    let address = format!("workloadIps: [\"{}\"]", net.ip(11));
    assert!(settings.mesh.contains(&address));
    let by_name = "hostname: Gateways.Example., workloadIps: []";
    settings.mesh = settings.mesh.replace(&address, by_name);
    settings.more += &format!("dns: {{servers: [\"{}\"]}}\n", net.address(2, 5300));
    settings
}

async fn server(net: Net, hosts: &[u8], ttl: u32) -> DnsServer {
    DnsServer::start(net.address(2, 5300), says(net, hosts, ttl)).await
}

fn says(net: Net, hosts: &[u8], ttl: u32) -> Answer {
    Answer::Addresses(hosts.iter().map(|host| net.ip(*host)).collect(), ttl)
}

/// Starts endpoints that send their own host.
async fn endpoints(net: Net, hosts: [u8; 2]) -> [Endpoint; 2] {
    let endpoint = async |host: u8| {
        Endpoint::new(net.listen(host, 9000).await, move |mut stream| async move {
            let _ = stream.write_u8(host).await;
            let _ = stream.shutdown().await;
        })
    };
    [endpoint(hosts[0]).await, endpoint(hosts[1]).await]
}

/// Returns the host that answers a tunnel, if the tunnel opens.
async fn answered(client: &Client) -> Option<u8> {
    let mut tunnel = client.tunnel(ECHO).await.ok()?;
    let host = tunnel.read_u8().await.ok();
    let _ = tunnel.shutdown().await;
    host
}

/// Opens tunnels until both of these hosts have answered. Returns that time.
async fn reached(client: &Client, hosts: [u8; 2]) -> Duration {
    let start = Instant::now();
    let mut left: Vec<_> = hosts.into();
    while !left.is_empty() {
        assert!(start.elapsed() < Duration::from_secs(10), "{left:?} are not reached");
        if let Some(host) = answered(client).await {
            left.retain(|one| *one != host);
        } else {
            // deadline: a rejected client retries.
            sleep(Duration::from_millis(20)).await;
        }
    }
    start.elapsed()
}

#[test]
fn addresses_that_are_replaced_at_once_are_dialled_by_their_ttl() {
    run(async {
        let net = Net::new();
        let server = server(net, &[11, 12], 1).await;
        let gateway = Gateway::start(&settings(net)).await;
        let _old = endpoints(net, [11, 12]).await;
        let _new = endpoints(net, [13, 14]).await;
        let client = gateway.client(identities()).await;
        reached(&client, [11, 12]).await;
        server.set_answer(says(net, &[13, 14], 1));
        let time = reached(&client, [13, 14]).await;
        assert!(time < RECOVERY, "{time:?}");
        for _ in 0..20 {
            let host = answered(&client).await.expect("an answer");
            assert!([13, 14].contains(&host), "{host} has gone from the name");
        }
        let (_, page) = gateway.http(15000, "GET", "/status?format=json").await;
        let page: serde_json::Value = serde_json::from_str(&page).expect("JSON");
        let host = &page["hosts"]["list"][0];
        assert_eq!(host["name"], "gateways.example");
        let addresses = [13, 14].map(|host| net.ip(host).to_string());
        assert_eq!(host["addresses"], serde_json::json!(addresses));
        assert!(host["answered"].is_string() && host["error"].is_null(), "{host}");
    });
}

#[test]
fn addresses_that_do_not_answer_are_looked_up_again_before_their_ttl() {
    run(async {
        let net = Net::new();
        let server = server(net, &[11, 12], 300).await;
        let gateway = Gateway::start(&settings(net)).await;
        let old = endpoints(net, [11, 12]).await;
        let client = gateway.client(identities()).await;
        reached(&client, [11, 12]).await;
        assert_eq!(server.queries(), 2, "one of each family");
        // All of them are replaced at once.
        server.set_answer(says(net, &[13, 14], 300));
        drop(old);
        let _new = endpoints(net, [13, 14]).await;
        let time = reached(&client, [13, 14]).await;
        assert!(time < RECOVERY, "{time:?}");
        let count = server.queries();
        assert!((4..=12).contains(&count), "{count} queries");
    });
}

#[test]
fn while_lookups_fail_the_last_good_answer_stays() {
    run(async {
        let net = Net::new();
        let server = server(net, &[11, 12], 1).await;
        let gateway = Gateway::start(&settings(net)).await;
        let _endpoints = endpoints(net, [11, 12]).await;
        let client = gateway.client(identities()).await;
        reached(&client, [11, 12]).await;
        let status = async || gateway.run_command(&["status"]).await.1;
        for (says, why) in
            [(NXDOMAIN, "no address in the answer"), (SERVFAIL, "gateways.example fail: ")]
        {
            server.set_answer(says);
            let error = |page: &String| page.contains("lookups of") && page.contains(why);
            until(why, status, error).await;
            reached(&client, [11, 12]).await;
            server.set_answer(says_nothing_new(net));
            let good = |page: &String| !page.contains("lookups of");
            until("an answer again", status, good).await;
        }
        gateway.logged("hostname lookup failed").await;
    });
}

fn says_nothing_new(net: Net) -> Answer {
    says(net, &[12, 11], 1)
}

#[test]
fn without_any_answer_there_is_no_endpoint_and_nothing_else_fails() {
    run(async {
        let net = Net::new();
        let server = DnsServer::start(net.address(2, 5300), Answer::Nothing).await;
        let gateway = Gateway::start(&settings(net)).await;
        let client = gateway.client(identities()).await;
        let refused = client.tunnel(ECHO).await.expect_err("no endpoint yet");
        assert!(refused.to_string().contains("503"), "{refused}");
        assert_eq!(gateway.tunnels("no_endpoint").await, 1.0);
        let _endpoints = endpoints(net, [11, 12]).await;
        server.set_answer(says(net, &[11, 12], 1));
        reached(&client, [11, 12]).await;
        // A change of the mesh at run time removes the name, and the state for it.
        let path = gateway.file("mesh.yaml");
        let text = std::fs::read_to_string(&path).expect("a file");
        let by_address = format!("workloadIps: [\"{}\"]", net.ip(12));
        let by_name = "hostname: Gateways.Example., workloadIps: []";
        crate::support::replace(&path, &text.replace(by_name, &by_address));
        let status = async || gateway.run_command(&["status"]).await.1;
        until("the name is gone", status, |page| !page.contains("gateways.example")).await;
        assert_eq!(answered(&client).await, Some(12));
    });
}

#[test]
fn only_hostnames_that_a_service_within_reach_would_dial_are_looked_up() {
    run(async {
        let net = Net::new();
        let server = server(net, &[11, 12], 300).await;
        let mut settings = settings(net);
        settings.mesh += "  - {uid: hidden, name: hidden, namespace: app, hostname: hidden.example,
     workloadIps: [], network: east, services: {app/secret.app.svc.cluster.local: {80: 9000}}}
  - {uid: west, name: west, namespace: app, hostname: west.example, workloadIps: [],
     network: west, services: {app/echo.app.svc.cluster.local: {80: 9000}}}
";
        let gateway = Gateway::start(&settings).await;
        let _endpoints = endpoints(net, [11, 12]).await;
        let client = gateway.client(identities()).await;
        reached(&client, [11, 12]).await;
        assert_eq!(server.queries(), 2, "one of each family");
        let hosts = async || {
            let (_, page) = gateway.http(15000, "GET", "/status?format=json").await;
            let page: serde_json::Value = serde_json::from_str(&page).expect("JSON");
            let list = page["hosts"]["list"].as_array().expect("a list").clone();
            let names = list.iter().filter_map(|host| host["name"].as_str());
            names.map(ToOwned::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(hosts().await, ["gateways.example"]);

        let file = gateway.file("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a configuration");
        let entry = "services:\n    - {service: secret.app.svc.cluster.local, \
                     to: [{anyone: true}]}\n";
        let exposed = text.replacen("services:\n", entry, 1);
        assert_ne!(exposed, text);
        crate::support::replace(&file, &exposed);
        let both = ["gateways.example", "hidden.example"];
        until("the exposed service's", hosts, |names| *names == both).await;
        assert_eq!(server.queries(), 4);
        crate::support::replace(&file, &text);
        let first = &both[..1];
        until("the end of its exposure", hosts, |names| *names == first).await;
    });
}
