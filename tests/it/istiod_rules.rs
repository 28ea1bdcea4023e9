//! Rules by which istiod sends resources, in the control plane of these tests.

use std::collections::BTreeSet;

use strait::grpc::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use strait::grpc::security::{Action, Authorization, Scope};
use strait::grpc::workload::gateway_address::Destination;
use strait::grpc::workload::{Address, GatewayAddress, NamespacedHostname, Port, Service, address};
use strait::xds::store::{ADDRESS, AUTHORIZATION, CLUSTER};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Endpoint;

use crate::support::istiod::{BUILT_IN, Istiod, Serving};
use crate::support::services::discovery::aggregated_discovery_service_client as ads;
use crate::support::wds::{SERVICE, changed, policy, service, waypoint_ports, workload};
use crate::support::{Net, run};

const WAYPOINT: &str = "app/way.app.svc.cluster.local";

/// Stream of a client that acknowledges nothing.
struct Client {
    requests: mpsc::Sender<DeltaDiscoveryRequest>,
    responses: Streaming<DeltaDiscoveryResponse>,
    _serving: Serving,
}

impl Client {
    async fn start(istiod: &Istiod) -> Self {
        let address = Net::new().address(2, 15012);
        let serving = istiod.serve_plaintext(address).await;
        let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address");
        let channel = endpoint.connect().await.expect("a connection");
        let (requests, received) = mpsc::channel(16);
        let call = ads::AggregatedDiscoveryServiceClient::new(channel)
            .delta_aggregated_resources(ReceiverStream::new(received))
            .await;
        Self { requests, responses: call.expect("a stream").into_inner(), _serving: serving }
    }

    async fn asks(&self, type_url: &str, subscribe: &[&str], unsubscribe: &[&str]) {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let request = DeltaDiscoveryRequest {
            type_url: type_url.to_owned(),
            resource_names_subscribe: owned(subscribe),
            resource_names_unsubscribe: owned(unsubscribe),
            ..DeltaDiscoveryRequest::default()
        };
        self.requests.send(request).await.expect("a stream");
    }

    /// Returns the type of the next response, and the names that it sends and removes.
    async fn received(&mut self) -> (String, BTreeSet<String>, BTreeSet<String>) {
        let response = self.responses.message().await.expect("a stream");
        let response = response.expect("a response");
        let sent = response.resources.into_iter().map(|one| one.name);
        (response.type_url, sent.collect(), response.removed_resources.into_iter().collect())
    }

    async fn expects(&mut self, type_url: &str, sent: &[&str], removed: &[&str]) {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let expected = (type_url.to_owned(), names(sent), names(removed));
        assert_eq!(self.received().await, expected);
    }
}

#[test]
fn a_push_has_names_that_changed_and_are_subscribed_to_and_no_other() {
    run(async {
        let istiod = Istiod::default();
        let pod = |name: &str| istiod.put(ADDRESS, name, &workload(name, vec![127, 0, 0, 9]));
        istiod.put(ADDRESS, SERVICE, &service());
        pod("a");
        let mut client = Client::start(&istiod).await;
        client.asks(ADDRESS, &[SERVICE], &[]).await;
        client.expects(ADDRESS, &[SERVICE, "a"], &[]).await;
        // A pod that joins a service has a name without a subscription.
        pod("b");
        pod("a");
        client.expects(ADDRESS, &["a"], &[]).await;
        // A request that changes no subscription has no answer; a new one has the workloads.
        client.asks(ADDRESS, &[SERVICE], &[]).await;
        client.asks(ADDRESS, &["app/other"], &[SERVICE]).await;
        client.expects(ADDRESS, &[], &["app/other"]).await;
        client.asks(ADDRESS, &[SERVICE], &[]).await;
        client.expects(ADDRESS, &[SERVICE, "a", "b"], &[]).await;
        istiod.remove(ADDRESS, "b");
        client.expects(ADDRESS, &[], &["b"]).await;
        pod("c");
        // A service that changes is sent with its workloads.
        istiod.put(ADDRESS, SERVICE, &service());
        client.expects(ADDRESS, &[SERVICE, "a", "c"], &[]).await;
    });
}

/// Returns the service with a port for DNS, behind a waypoint.
fn behind_waypoint() -> Address {
    let mut message = service();
    if let Some(address::Type::Service(service)) = &mut message.r#type {
        service.ports.push(Port { service_port: 53, target_port: 53, ..Port::default() });
        let (namespace, hostname) = WAYPOINT.split_once('/').expect("a namespace");
        service.waypoint = Some(GatewayAddress {
            destination: Some(Destination::Hostname(NamespacedHostname {
                namespace: namespace.into(),
                hostname: hostname.into(),
            })),
            hbone_mtls_port: 15008,
        });
    }
    message
}

#[test]
fn a_push_of_clusters_has_the_whole_set_and_names_removals_later() {
    run(async {
        let istiod = Istiod::default();
        istiod.put(ADDRESS, SERVICE, &behind_waypoint());
        istiod.make_udp(SERVICE, 53);
        let (namespace, hostname) = WAYPOINT.split_once('/').expect("a namespace");
        let waypoint = Service {
            namespace: namespace.into(),
            hostname: hostname.into(),
            ports: waypoint_ports(),
            ..Service::default()
        };
        let waypoint = Address { r#type: Some(address::Type::Service(waypoint)) };
        istiod.put(ADDRESS, WAYPOINT, &waypoint);
        let mut client = Client::start(&istiod).await;
        client.asks(CLUSTER, &[], &[]).await;
        client.expects(CLUSTER, &BUILT_IN, &[]).await;

        let own = [
            "inbound-vip|80|tcp|echo.app.svc.cluster.local",
            "inbound-vip|15008|tcp|way.app.svc.cluster.local",
            "inbound-vip|15021|tcp|way.app.svc.cluster.local",
        ];
        let all = [&BUILT_IN[..], &own].concat();
        istiod.export(SERVICE);
        client.expects(CLUSTER, &all, &[]).await;
        // Every change of an address pushes the whole set.
        istiod.put(ADDRESS, "a", &workload("a", vec![127, 0, 0, 9]));
        client.expects(CLUSTER, &all, &[]).await;
        istiod.unexport(SERVICE);
        client.expects(CLUSTER, &BUILT_IN, &[]).await;
        let sick = changed("a", vec![127, 0, 0, 9], |one| one.capacity = Some(0));
        istiod.put(ADDRESS, "a", &sick);
        client.expects(CLUSTER, &BUILT_IN, &own).await;
    });
}

#[test]
fn a_dry_run_is_sent_only_where_it_is_enabled() {
    run(async {
        let istiod = Istiod::default();
        let tries = Authorization {
            dry_run: true,
            ..policy("tries", Scope::Namespace, Action::Deny, "shop")
        };
        istiod.put(AUTHORIZATION, "app/tries", &tries);
        let mut client = Client::start(&istiod).await;
        client.asks(AUTHORIZATION, &[], &[]).await;
        client.expects(AUTHORIZATION, &[], &[]).await;
        istiod.enable_dry_run();
        istiod.put(AUTHORIZATION, "app/tries", &tries);
        client.expects(AUTHORIZATION, &["app/tries"], &[]).await;
    });
}
