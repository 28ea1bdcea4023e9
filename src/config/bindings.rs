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
        workloads: Workloads = nested();
        /// Names that the DNS responder answers with the address of `listen`, or with a VIP where
        /// `listen` has no specific address.
        names: Vec<String> as NonEmpty<Hostname> = default(
            vec![service.host.clone()], "the hostname of `service`");
        /// Maximum number of open connections.
        connections: u32 as Connections = default(CONNECTIONS);
        /// Maximum number of open connections of one client, which is an IPv4 address or an IPv6
        /// /64.
        connections_per_client: u32 as Connections = default(CONNECTIONS_PER_CLIENT);
        /// Time without a byte in either direction after which a connection is reset.
        idle: Duration as IdleTime = default(IDLE);
        /// True for the entry of an object.
        is_of_object: bool = aside(|_| false);
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
    pub struct Workloads at "bindings[].workloads" or default {
        /// Identities (`spiffe://…`).
        identities: Vec<String> as NonEmpty<WorkloadId> = default(
            Vec::new(), "every workload of the cluster, unless `namespaces` is given");
        /// Namespaces of their identities.
        namespaces: Vec<String> as NonEmpty<Segment> = default(
            Vec::new(), "every workload of the cluster, unless `identities` is given");
    }
}

impl ObjectBindings {
    /// Returns a binding with the defaults of `bindings[]`.
    pub fn binding(
        &self,
        (cluster, service): (Vec<String>, HostPort),
        (name, listen): (String, SocketAddr),
        line: Line,
    ) -> Binding {
        Binding {
            cluster,
            service,
            listen,
            clients: self.clients.clone(),
            to: self.to.clone(),
            inner: Inner::Hbone,
            workloads: Workloads::default(),
            names: vec![name],
            connections: CONNECTIONS,
            connections_per_client: CONNECTIONS_PER_CLIENT,
            idle: IDLE,
            is_of_object: true,
            line,
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
    if binding.inner == Inner::Tcp && binding.workloads != Workloads::default() {
        let what = "applies to `inner: hbone`: a workload behind `tcp` has no identity";
        value.at(PLACE, "workloads").error(what, "`inner: hbone`");
        return None;
    }
    Some(binding)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{GOOD, check, with};
    use super::*;
    use crate::config::Listener;

    /// Returns the findings about this binding.
    fn binding(rest: &str) -> String {
        with(&format!(
            "bindings: [{{service: \"echo.app:80\", listen: \"127.0.0.1:8080\", {rest}}}]"
        ))
    }

    #[test]
    fn every_key_is_read() {
        let text = "bindings:
  - cluster: [west, partner.example]
    service: ECHO.app:80
    listen: \"0.0.0.0:8080\"
    clients: [10.0.0.0/8]
    to: [{cluster: east, namespaces: [shop]}]
    workloads: {identities: [\"spiffe://west.local/ns/app/sa/echo\"], namespaces: [shop]}
    names: [echo.global]
    connections: 10
    connections_per_client: 2
    idle: 90s
";
        let (config, findings) = check(&format!("{GOOD}{text}"));
        assert_eq!(findings, "");
        let bindings = config.expect("a configuration").bindings;
        let expected = Binding {
            cluster: vec!["west".to_owned(), "partner.example".to_owned()],
            service: HostPort::parse("echo.app:80").expect("a service"),
            listen: ([0, 0, 0, 0], 8080).into(),
            clients: vec!["10.0.0.0/8".parse().expect("a network")],
            to: vec![Audience {
                cluster: Some("east".to_owned()),
                namespaces: vec!["shop".to_owned()],
                ..Audience::default()
            }],
            inner: Inner::Hbone,
            workloads: Workloads {
                identities: vec!["spiffe://west.local/ns/app/sa/echo".to_owned()],
                namespaces: vec!["shop".to_owned()],
            },
            names: vec!["echo.global".to_owned()],
            connections: 10,
            connections_per_client: 2,
            idle: Duration::from_secs(90),
            is_of_object: false,
            line: Line::default(),
        };
        assert_eq!(bindings, [expected]);
    }

    #[test]
    fn what_is_left_out_admits_only_this_host() {
        let text =
            "bindings: [{cluster: west, service: \"a.b:1\", listen: \"127.0.0.1:1\", inner: tcp}]";
        let (config, findings) = check(&format!("{GOOD}{text}"));
        assert_eq!(findings, "");
        let binding = &config.expect("a configuration").bindings[0];
        let clients: Vec<_> = binding.clients.iter().map(ToString::to_string).collect();
        assert_eq!(clients, ["127.0.0.0/8", "::1/128"]);
        assert_eq!(binding.names, ["a.b"]);
        assert_eq!((binding.connections, binding.connections_per_client), (1024, 256));
        assert_eq!((binding.idle, binding.inner), (IDLE, Inner::Tcp));
        let listener = serde_json::to_value(Listener::from(binding)).expect("JSON");
        assert_eq!(listener["protocol"], "binding");
        assert_eq!(listener["service"], "a.b:1");
        assert_eq!(listener["name"], "binding a.b:1");
    }

    #[test]
    fn every_key_for_bindings_of_objects_is_read() {
        let bindings = |keys: &str| {
            let text = format!("exposure: {{files: [Cargo.toml], bindings: {{{keys}}}}}");
            check(&format!("{GOOD}{text}\n"))
        };
        let keys = "addresses: fd00::/64, clients: [10.0.0.0/8], to: [{anyone: true}]";
        let (config, findings) = bindings(keys);
        assert_eq!(findings, "");
        let read = config.expect("a configuration").exposure.bindings;
        let expected = ObjectBindings {
            addresses: "fd00::/64".parse().expect("a network"),
            clients: vec!["10.0.0.0/8".parse().expect("a network")],
            to: vec![Audience { anyone: true, ..Audience::default() }],
        };
        assert_eq!(read, Some(expected));
        let (config, _) = bindings("addresses: 127.64.0.0/10");
        let read = config.expect("a configuration").exposure.bindings;
        assert_eq!(read.expect("the bindings").clients, loopback());
        for (keys, want) in [
            ("", "error: `exposure.bindings` has no `addresses`"),
            ("addresses: a", "error: `exposure.bindings.addresses` is `a`"),
            (
                "addresses: fd00::/64, to: [{name: a}]",
                "error: unknown key `name` in `exposure.bindings.to[]`",
            ),
            (
                "addresses: fd00::/64, clients: [\"::/0\"]",
                "warning: `exposure.bindings.clients` contains ::/0: every address may use",
            ),
        ] {
            let (_, findings) = bindings(keys);
            assert!(findings.contains(want), "{findings}");
        }
        let found = with("exposure: {bindings: {addresses: 127.64.0.0/10}}");
        assert!(found.contains("is for objects of `exposure.files`"), "{found}");
    }

    #[test]
    fn clients_with_an_identity_may_have_every_address() {
        for (keys, count) in
            [("to: [{cluster: west}]", 0), ("to: [{cluster: west}], clients: [0.0.0.0/0]", 1)]
        {
            let text = format!(
                "bindings: [{{service: \"a.b:1\", listen: \"127.0.0.1:1\", cluster: west, \
                 {keys}}}]"
            );
            let (config, findings) = check(&format!("{GOOD}{text}"));
            assert_eq!(findings, "", "{keys}");
            let bindings = config.expect("a configuration").bindings;
            assert_eq!(bindings[0].clients.len(), count, "{keys}");
        }
    }

    #[test]
    fn mistakes_have_a_remedy() {
        for (rest, want) in [
            ("inner: hbone", "error: `bindings[]` has no `cluster`"),
            (
                "cluster: wets",
                "error: `bindings[].cluster` is `wets`, which is not a cluster of `trust`",
            ),
            (
                "cluster: [west, east]",
                "error: `bindings[].cluster[]` is `east`, the cluster of this gateway",
            ),
            ("cluster: []", "error: `bindings[].cluster` is empty"),
            ("cluster: west, clients: []", "error: `bindings[].clients` is empty"),
            (
                "cluster: west, clients: [0.0.0.0/0]",
                "warning: `bindings[].clients` contains 0.0.0.0/0: every address",
            ),
            ("cluster: west, to: []", "error: `bindings[].to` is empty"),
            (
                "cluster: west, to: [{cluster: moon}]",
                "error: `bindings[].to[].cluster` is `moon`, which is not a cluster of `trust`",
            ),
            ("cluster: west, to: [{}]", "error: `bindings[].to[]` admits nobody"),
            (
                "cluster: west, to: [{namespaces: [a], service_accounts: [b/c]}]",
                "error: `bindings[].to[].service_accounts[]` has `b/c`, whose namespace",
            ),
            (
                "cluster: west, inner: tcp, workloads: {namespaces: [a]}",
                "error: `bindings[].workloads` applies to `inner: hbone`",
            ),
            (
                "cluster: west, workloads: {identities: [a]}",
                "error: `bindings[].workloads.identities[]` is `a`",
            ),
            (
                "cluster: west, idle: 0s",
                "error: `bindings[].idle` is `0s`; write a duration from 1s to 7d",
            ),
            (
                "cluster: west, connections: 0",
                "error: `bindings[].connections` is `0`; write a whole number",
            ),
        ] {
            let found = binding(rest);
            assert!(found.starts_with(&format!("11: {want}")), "{rest}: {found}");
        }
        let twice = "{cluster: west, service: \"a.b:1\", listen: \"127.0.0.1:15021\"}";
        let found = with(&format!("bindings: [{twice}, {twice}]"));
        let want = "`bindings[]` a.b:1 (127.0.0.1:15021) overlaps `bindings[]` a.b:1";
        assert!(found.contains(want), "{found}");
        let want = "overlaps `bindings[]` a.b:1 (127.0.0.1:15021)";
        assert!(found.contains(want), "{found}");
    }
}
