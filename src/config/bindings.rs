//! The `bindings` section: services of other clusters, for local clients.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use ipnet::IpNet;

use super::audience::Audience;
use super::define::{
    Connections, Hostname, IdleTime, NonEmpty, OneOrMore, Segment, ServicePort, section, words,
};
use super::line::Line;
use super::names::HostPort;
use super::trust::WorkloadId;
use crate::yaml::Value;

const PLACE: &str = "bindings[]";

/// Default of `bindings[].connections`.
const CONNECTIONS: u32 = 1024;

/// Default of `bindings[].connections_per_client`.
const CONNECTIONS_PER_CLIENT: u32 = 256;

/// Default of `bindings[].idle`, that of Envoy's TCP proxy.
const IDLE: Duration = Duration::from_secs(60 * 60);

section! {
    /// A service of other clusters at a local address.
    pub struct Binding at "bindings[]", check(check) {
        /// Cluster whose gateways expose the service, or several, over which connections are
        /// spread by the ready instances of each network. `networks` or the mesh name the gateways.
        cluster: Vec<String> as OneOrMore<String> = required("west");
        /// Hostname and port by which the gateways know the service.
        service: HostPort as ServicePort = required("\"echo.app.svc.cluster.local:80\"");
        /// Address and port for local clients.
        listen: SocketAddr = required("\"127.0.0.1:8080\"");
        /// Networks whose addresses may connect. Connections of others are reset. Without `to`,
        /// local clients have no identity: they use the service with the identity of this gateway.
        clients: Vec<IpNet> as NonEmpty<IpNet> = default(
            loopback(), "`127.0.0.0/8` and `::1/128`; with `to` every address");
        /// Clients that may connect, as `exposure.services[].to`. They speak mutual TLS, and are
        /// verified as peers. The service still receives the identity of this gateway.
        to: Vec<Audience> as NonEmpty<Audience> = default(Vec::new(), "clients speak plain TCP");
        /// Protocol between this gateway and the workload.
        inner: Inner = default(Inner::Hbone);
        /// Workloads that may serve, of `inner: hbone`. The cluster of a workload is always that of
        /// its gateway.
        workloads: ExpectedWorkloads = nested();
        /// Names that the DNS responder answers with the address of `listen`, or with a VIP where
        /// `listen` has no specific address.
        names: Vec<String> as NonEmpty<Hostname> = default(
            vec![service.host.clone()], "the hostname of `service`");
        /// Maximum number of open connections.
        connections: u32 as Connections = default(CONNECTIONS);
        /// Maximum number of open connections of one client, which is an IPv4 address or an IPv6
        /// /64.
        connections_per_client: u32 as Connections = default(CONNECTIONS_PER_CLIENT);
        /// Time without a byte in either direction after which a connection is reset, at most a
        /// quarter of it later.
        idle: Duration as IdleTime = default(IDLE);
        /// The lines of the objects that describe it; none for an entry of the configuration.
        objects: Vec<Line> = aside(|_| Vec::new());
        /// The line of the entry, for findings that need other sections.
        line: Line = aside(Line::of);
    }
}

section! {
    /// Bindings of RemoteServiceBinding objects.
    pub struct ObjectBindings at "exposure.bindings", check(check_of_objects) {
        /// Network of their addresses. Each binding listens at the port of its service, at an
        /// address that is derived from its local name and stays the same. A network of one
        /// address, such as `0.0.0.0/32`, is that of all.
        addresses: IpNet = required("127.64.0.0/10");
        /// Networks whose addresses may connect, as `bindings[].clients`.
        clients: Vec<IpNet> as NonEmpty<IpNet> = default(
            loopback(), "`127.0.0.0/8` and `::1/128`; with `to` every address");
        /// Clients that may connect by mutual TLS, as `bindings[].to`.
        to: Vec<Audience> as NonEmpty<Audience> = default(Vec::new(), "clients speak plain TCP");
    }
}

words! {
    /// Protocol between a binding and the workload, inside the tunnel to its gateway.
    pub enum Inner {
        /// HBONE: mutual TLS with HTTP/2 CONNECT, which ends at the workload. Both its identity and
        /// that of the gateway are verified.
        Hbone = "hbone",
        /// The bytes of the client. Only the identity of the gateway is verified.
        Tcp = "tcp",
    }
}

section! {
    /// Workloads that may serve a binding. Each matches one of the keys.
    pub struct ExpectedWorkloads at "bindings[].workloads" or default {
        /// Identities (`spiffe://…`).
        identities: Vec<String> as NonEmpty<WorkloadId> = default(
            Vec::new(), "every workload of the cluster, unless `namespaces` is given");
        /// Namespaces of their identities.
        namespaces: Vec<String> as NonEmpty<Segment> = default(
            Vec::new(), "every workload of the cluster, unless `identities` is given");
    }
}

impl ObjectBindings {
    /// Returns the binding of the objects at these lines, with the defaults of `bindings[]`.
    pub fn binding(
        &self,
        (cluster, service): (Vec<String>, HostPort),
        (name, listen): (String, SocketAddr),
        objects: Vec<Line>,
    ) -> Binding {
        Binding {
            cluster,
            service,
            listen,
            clients: self.clients.clone(),
            to: self.to.clone(),
            inner: Inner::Hbone,
            workloads: ExpectedWorkloads::default(),
            names: vec![name],
            connections: CONNECTIONS,
            connections_per_client: CONNECTIONS_PER_CLIENT,
            idle: IDLE,
            line: objects.first().cloned().unwrap_or_default(),
            objects,
        }
    }
}

/// Returns the addresses of this host alone.
pub(super) fn loopback() -> Vec<IpNet> {
    let v4 = IpNet::new_assert(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0)), 8);
    vec![v4, IpNet::from(IpAddr::V6(Ipv6Addr::LOCALHOST))]
}

/// Opens `clients` where `to` restricts them instead, and warns of plain TCP for every address.
fn check_clients(
    (clients, to): (&mut Vec<IpNet>, &[Audience]),
    given: Option<Value<'_>>,
    service: &str,
) {
    let Some(value) = given else {
        if !to.is_empty() {
            clients.clear();
        }
        return;
    };
    if to.is_empty()
        && let Some(open) = clients.iter().find(|net| net.prefix_len() == 0)
    {
        let what = format!(
            "contains {open}: every address may use {service} with the identity of this gateway"
        );
        value.warning(what, "the networks of the clients");
    }
}

#[expect(clippy::unnecessary_wraps, reason = "a check may refuse what was read")]
fn check_of_objects(mut bindings: ObjectBindings, value: Value<'_>) -> Option<ObjectBindings> {
    let given = value.child("exposure.bindings", "clients");
    let clients = (&mut bindings.clients, &*bindings.to);
    check_clients(clients, given, "these services");
    Some(bindings)
}

fn check(mut binding: Binding, value: Value<'_>) -> Option<Binding> {
    let service = binding.service.to_string();
    let clients = (&mut binding.clients, &*binding.to);
    check_clients(clients, value.child(PLACE, "clients"), &service);
    if binding.inner == Inner::Tcp && binding.workloads != ExpectedWorkloads::default() {
        let what = "applies to `inner: hbone`: a workload behind `tcp` has no identity";
        value.at(PLACE, "workloads").error(what, "`inner: hbone`");
        return None;
    }
    Some(binding)
}
