//! The export set as istiod sends it: all clusters in each push, and none removed.

use std::time::{Duration, Instant};

use strait::grpc::discovery::{DeltaDiscoveryResponse, Resource};
use strait::grpc::workload::{Address, PortList, Service, address};
use strait::xds::store::{ADDRESS, CLUSTER};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::istio::{asks, spawn};
use crate::support::istiod::{Istiod, NAME, Serving};
use crate::support::wds::{HOSTNAME, SERVICE, bytes, changed, ports, service, workload};
use crate::support::{ECHO, Endpoint, Gateway, Net, Settings, broken, identities, run, until};

/// Clusters that istiod sends to every east-west gateway.
const STATIC: [&str; 4] = ["main_internal", "encap", "forward_inner_connect", "BlackHoleCluster"];

/// A push of these clusters, without a version and with nothing removed.
fn push(nonce: &str, clusters: &[&str]) -> DeltaDiscoveryResponse {
    let resources = clusters.iter().map(|name| Resource {
        name: (*name).into(),
        resource: Some(prost_types::Any { type_url: CLUSTER.into(), value: vec![7; 2_000] }),
        ..Resource::default()
    });
    DeltaDiscoveryResponse {
        type_url: CLUSTER.into(),
        nonce: nonce.into(),
        resources: resources.collect(),
        ..DeltaDiscoveryResponse::default()
    }
}

/// A push of the whole set.
fn whole(nonce: &str, exported: &[&str]) -> DeltaDiscoveryResponse {
    push(nonce, &[&STATIC, exported].concat())
}

struct World {
    net: Net,
    gateway: Gateway,
    istiod: Istiod,
    _endpoint: Endpoint,
    _serving: Serving,
}

impl World {
    /// Starts a gateway that exposes only istiod's exports.
    async fn start() -> Self {
        let net = Net::new();
        let mut settings = Settings::new(net, identities());
        settings.exposure = "    []\n".to_owned();
        let mut gateway = spawn(&settings, NAME);
        let endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let istiod = Istiod::default();
        istiod.put(ADDRESS, SERVICE, &service());
        istiod.put(ADDRESS, "a", &workload("a", bytes(net.ip(11))));
        let serving = istiod.serve(net.address(2, 15012), identities()).await;
        gateway.ready().await;
        Self { net, gateway, istiod, _endpoint: endpoint, _serving: serving }
    }

    /// Sends a push, and waits until it is acknowledged.
    async fn says(&self, push: &DeltaDiscoveryResponse) {
        self.istiod.push_unstored(push);
        let answer = async || {
            let requests = self.istiod.requests().into_iter();
            let mut requests = requests.filter(|request| request.response_nonce == push.nonce);
            requests.next()
        };
        let answer = until("an answer", answer, Option::is_some).await;
        assert_eq!(answer.and_then(|answer| answer.error_detail), None);
    }

    /// Makes the one workload serve other services too. Returns their hosts.
    fn serve_too(&self, names: &[&str]) -> Vec<String> {
        let hosts = names.iter().map(|name| format!("{name}.app.svc.cluster.local"));
        let hosts: Vec<_> = hosts.collect();
        for (name, host) in names.iter().zip(&hosts) {
            let service = Service {
                name: (*name).into(),
                namespace: "app".into(),
                hostname: host.clone(),
                ports: ports(),
                ..Service::default()
            };
            let service = Address { r#type: Some(address::Type::Service(service)) };
            self.istiod.put(ADDRESS, &format!("app/{host}"), &service);
        }
        let serves = changed("a", bytes(self.net.ip(11)), |workload| {
            for host in &hosts {
                let ports = PortList { ports: ports() };
                workload.services.insert(format!("app/{host}"), ports);
            }
        });
        self.istiod.put(ADDRESS, "a", &serves);
        hosts
    }

    async fn is_exposed(&self) {
        let requested = async || asks(&self.gateway).await;
        until("the export", requested, Result::is_ok).await.expect("a tunnel");
    }
}

#[test]
fn a_service_that_a_whole_push_leaves_out_is_refused_and_its_tunnels_end() {
    run(async {
        let world = World::start().await;
        let own = format!("inbound-vip|80|tcp|{HOSTNAME}");
        let other = "inbound-vip|80|tcp|other.app.svc.cluster.local";
        // The removal of the last export does not affect the static clusters.
        for rest in [&[other][..], &[]] {
            let turn = rest.len().to_string();
            let exported = [&[&*own], rest].concat();
            world.says(&whole(&format!("on-{turn}"), &exported)).await;
            world.is_exposed().await;
            let client = world.gateway.client(identities()).await;
            let mut open = client.tunnel(ECHO).await.expect("a tunnel");

            let began = Instant::now();
            world.says(&whole(&format!("off-{turn}"), rest)).await;
            let refused = async || asks(&world.gateway).await;
            let refused = until("the refusal", refused, Result::is_err).await;
            let took = began.elapsed();
            assert!(refused.is_err_and(|why| why.contains("503")));
            assert!(took < Duration::from_secs(1), "{took:?}");
            assert_eq!(broken(&mut open).await, Some(h2::Reason::INTERNAL_ERROR));
        }
        assert!((world.gateway.tunnels("revoked").await - 2.0).abs() < 0.5);
    });
}

#[test]
fn a_partial_push_removes_nothing_by_absence() {
    run(async {
        let world = World::start().await;
        // Before the first push: with each change of an address, the control plane sends its own
        // set of clusters.
        let others = world.serve_too(&["second", "third"]);
        let own = format!("inbound-vip|80|tcp|{HOSTNAME}");
        world.says(&whole("whole", &[&own])).await;
        world.is_exposed().await;
        let client = world.gateway.client(identities()).await;
        let mut open = client.tunnel(ECHO).await.expect("a tunnel");
        let fixed = [None, Some("main_internal")];
        for (host, fixed) in others.iter().zip(fixed) {
            let cluster = format!("inbound-vip|80|tcp|{host}");
            let clusters: Vec<_> = fixed.into_iter().chain([&*cluster]).collect();
            world.says(&push(host, &clusters)).await;
            let authority = format!("{host}:80");
            let opens = async || client.tunnel(&authority).await.map(drop).is_ok();
            until(host, opens, |&opens| opens).await;
            asks(&world.gateway).await.expect("a tunnel");
            open.write_all(b"still").await.expect("an open tunnel");
            let mut answer = [0; 5];
            open.read_exact(&mut answer).await.expect("an answer");
        }
        assert!(world.gateway.tunnels("revoked").await < 0.5);
    });
}
