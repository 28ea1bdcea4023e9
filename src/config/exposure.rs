//! The `exposure` section: services that peers may reach, the peers, and further names.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use super::audience::Audience;
use super::auto::AutoExport;
use super::bindings::ObjectBindings;
use super::define::{
    ConnectTime, ExistingPath, Positive, Segment, Service, TunnelTime, section, words,
};
use super::discovery::KubernetesApi;
use super::line::Line;
use super::names::HostPort;
use super::subsets::{self, ServiceSubset};
use super::transit::{TransitRule, TransitRules};
use crate::wire::Transit;
use crate::wire::sni::RouteBy;
use crate::yaml::Value;

const ENTRY: &str = "exposure.services[]";

section! {
    /// Services that peers may reach through the gateway.
    pub struct Exposure at "exposure" or default, check(check) {
        /// Exposure of services without an entry. With `discovery.kind: istio` and `envoy` the
        /// services that istiod exports (clusters `inbound-vip|PORT|tcp|HOST`) are exposed to the
        /// whole trust set besides, unless they have an entry: then the entry alone counts.
        default: DefaultExposure = default(DefaultExposure::None);
        /// Use of other networks by tunnels to services that an entry without `transit` or an
        /// export exposes: `off`, `failover` or `always`, or a list of rules. The hostname of a
        /// service counts first, then the longest `*.NAME`, its namespace, and a rule without
        /// both. `strait check` lists the services.
        transit: Vec<TransitRule> as TransitRules = default(Vec::new()) since "0.1.0";
        /// Exposed services.
        services: Vec<ExposedService> = default(Vec::new());
        /// Files of Kubernetes objects, and directories, of which every `.yaml`, `.yml` and `.json`
        /// is read. The objects export services, keep them in this cluster, or describe entries of
        /// `exposure.services`, `bindings` and `traffic`. With `discovery.kind: file` they also
        /// define services and endpoints.
        files: Vec<PathBuf> as Vec<ExistingPath> = default(Vec::new());
        /// API server whose objects are watched besides, with `discovery.kind: istio` and `envoy`.
        /// Discovery begins once they are read. `{}` is that of the pod.
        kubernetes: Option<KubernetesApi> = default(None, "no objects are watched") since "0.1.0";
        /// Rules by which Services of these files, or of an API server, are exported, besides
        /// those that export themselves.
        auto: Vec<AutoExport> = default(Vec::new());
        /// Use of the RemoteServiceBinding objects of these files, or of an API server, as
        /// `bindings`.
        bindings: Option<ObjectBindings> = default(None, "they are not used, with a warning");
        /// Namespace whose Dependency objects of Admiral limit which services this cluster uses
        /// from others: its own, as they limit the services of all namespaces. A service that one
        /// of them names is used only while a pod here has the identity of its source.
        dependencies: Option<String> as Option<Segment> = default(
            None, "they limit nothing, with a warning") since "0.1.0";
    }
}

words! {
    /// Exposure of services without an entry.
    pub enum DefaultExposure or None {
        /// They are not exposed.
        None = "none",
        /// They are exposed to every peer of the trust set, except services that only their
        /// namespace sees (`exportTo: ["."]`).
        All = "all",
    }
}

section! {
    /// A service that some peers may reach.
    pub struct ExposedService at "exposure.services[]", check(check_entry), compare(compare) {
        /// Hostname of the service, with a port or for all its ports.
        service: HostPort as Service = required("\"echo.app.svc.cluster.local:80\"");
        /// Namespace of the service. No service of another namespace has the hostname, or another
        /// name of its family, then.
        namespace: Option<String> as Option<Segment> = default(
            None, "that of the service with the hostname");
        /// Peers that may reach the service. Entries are alternatives; all keys of one entry must
        /// hold; the values of a key are alternatives.
        to: Vec<Audience> = default(Vec::new(), "no peer, with a warning");
        /// Further names under which these peers reach the service. No addresses, and no hostname
        /// of a service. Names without port have the port of `service`. `strait check` warns of two
        /// entries of a service with different names.
        names: Vec<HostPort> as Vec<Service> = default(Vec::new());
        /// Exposure of the service's workloads at their addresses and target ports, such as
        /// `10.0.0.7:8080`, unless a workload has a waypoint of its own.
        workloads: bool = default(false);
        /// Routing of tunnels to this service on HBONE listeners, as `listeners[].route_by`. All
        /// entries of one port of a service agree.
        route_by: Option<RouteBy> = default(None, "that of the listener");
        /// Use of other networks by tunnels of these peers. It widens their reach: gateways of
        /// other networks authorize this gateway, and not the peer. With `failover`, tunnels that
        /// came through another gateway stay in this network.
        transit: Option<Transit> = default(None, "that of `exposure.transit`");
        /// Limits of the tunnels that the entry admits. Peers cannot widen them. If several entries
        /// admit a tunnel, those of each apply. A peer that only a link admits has those of all
        /// entries of the service. Tunnels through `listeners[].routes` have none.
        limits: ServiceLimits = nested();
        /// Subsets of the endpoints, which server names `outbound_.PORT_.SUBSET_.HOST` and
        /// `names.aliases[].subset` select. They belong to the service, whatever the entry.
        subsets: Vec<ServiceSubset> = default(Vec::new());
        /// True for the entry of an object.
        is_of_object: bool = aside(|_| false);
        /// The line of the entry, for findings that need the mesh.
        line: Line = aside(Line::of);
    }
}

section! {
    /// Limits of tunnels. Open tunnels follow changes.
    pub struct ServiceLimits at "exposure.services[].limits" or default, derive(Copy, Eq) {
        /// Number of concurrent tunnels through this gateway. While there are others, one identity
        /// gets half of them, and one cluster two thirds. Further ones are rejected with
        /// `tunnel_limit`. A lower number ends no open tunnel.
        tunnels: Option<u32> as Option<Positive> = default(None, "no limit");
        /// Time to find an endpoint and to connect to it. The tunnel is rejected with
        /// `connect_timeout` after that.
        connect_timeout: Option<Duration> as Option<ConnectTime> = default(None, "10s");
        /// Time without a byte in either direction, after which the tunnel is reset with
        /// `idle_timeout`, at most a quarter of it later.
        idle_timeout: Option<Duration> as Option<TunnelTime> = default(None, "no limit");
        /// Time after which an open tunnel is reset with `max_duration`.
        max_duration: Option<Duration> as Option<TunnelTime> = default(None, "no limit");
    }
}

impl ExposedService {
    /// Returns an entry without peers.
    pub fn new(service: HostPort) -> Self {
        Self {
            service,
            namespace: None,
            to: Vec::new(),
            names: Vec::new(),
            workloads: false,
            route_by: None,
            transit: None,
            limits: ServiceLimits::default(),
            subsets: Vec::new(),
            is_of_object: false,
            line: Line::default(),
        }
    }

    /// Returns a subset that this entry defines.
    pub fn subset(&self, name: &str) -> Option<&ServiceSubset> {
        self.subsets.iter().find(|subset| subset.name == name)
    }
}

#[expect(clippy::unnecessary_wraps, reason = "a check may refuse what was read")]
fn check(exposure: Exposure, value: Value<'_>) -> Option<Exposure> {
    let at = |key| value.at("exposure", key);
    if exposure.default == DefaultExposure::All {
        let what = "is `all`: every service of the mesh can be reached by every trusted peer";
        at("default").warning(what, "`none` and an entry for each service that is shared");
    }
    Some(exposure)
}

/// Gives names without a port that of the service.
#[expect(clippy::unnecessary_wraps, reason = "a check may refuse what was read")]
fn check_entry(mut entry: ExposedService, value: Value<'_>) -> Option<ExposedService> {
    if entry.to.is_empty() {
        let what = format!("exposes `{}` to nobody", entry.service);
        value.warning(what, "`to: [{cluster: CLUSTER}]` or `to: [{anyone: true}]`");
    }
    for name in &mut entry.names {
        name.port = name.port.or(entry.service.port);
    }
    Some(entry)
}

type Entry<'a> = (ExposedService, Value<'a>);

fn compare(_: Value<'_>, entries: &[Entry<'_>]) {
    aliases_are_unambiguous(entries);
    subsets::are_unambiguous(entries.iter().map(|(exposed, value)| {
        let items = value.at(ENTRY, "subsets").entries().collect();
        (&*exposed.service.host, &*exposed.subsets, items)
    }));
    let mut seen: HashMap<&str, Vec<&ExposedService>> = HashMap::new();
    for (exposed, value) in entries {
        let service = &exposed.service;
        let earlier = seen.entry(&service.host).or_default();
        let same_port = || earlier.iter().filter(|other| other.service.overlaps(service));
        // Tunnels to one port of a service are routed in one way for all peers.
        if let Some(other) = same_port().find(|other| other.route_by != exposed.route_by) {
            let what =
                format!("differs for `{service}` from the one on line {}", other.line.number());
            let how = "the same `route_by`, or none, in both entries";
            value.at(ENTRY, "route_by").error(what, how);
        }
        if let Some(other) = same_port().find(|other| have_other_names(other, exposed)) {
            let what = format!(
                "has other `names` for `{service}` than line {}, and a name admits only the peers \
                 of its own entry",
                other.line.number()
            );
            let how = "the same `names` into both entries, or each name with its `consumers` into \
                       `names.aliases`";
            value.warning(what, how);
        }
        // No other namespace can have the hostname.
        let first = earlier.iter().find(|other| other.namespace.is_some());
        if let (Some(namespace), Some(first)) = (&exposed.namespace, first)
            && first.namespace != exposed.namespace
        {
            let what = format!(
                "has `namespace: {namespace}` for `{}`, and line {} has another one",
                service.host,
                first.line.number()
            );
            value.error(what, "the same `namespace` in both entries");
        }
        earlier.push(exposed);
    }
}

/// Returns whether two entries of a service have different `names`. Each name opens the service to
/// the peers of its own entry alone.
fn have_other_names(one: &ExposedService, other: &ExposedService) -> bool {
    let lacks = |one: &ExposedService, other: &ExposedService| {
        let has = |name: &HostPort| other.names.iter().any(|own| own.overlaps(name));
        !one.names.iter().all(has)
    };
    one.to != other.to && (lacks(one, other) || lacks(other, one))
}

/// A name must lead to one service: it is neither a service's own nor given to two.
fn aliases_are_unambiguous(entries: &[Entry<'_>]) {
    let mut services: HashMap<&str, Vec<&ExposedService>> = HashMap::new();
    for (exposed, _) in entries {
        services.entry(&exposed.service.host).or_default().push(exposed);
    }
    let mut given: HashMap<&str, Vec<(&HostPort, &HostPort, u64)>> = HashMap::new();
    for (exposed, entry) in entries {
        let items = entry.at(ENTRY, "names").entries();
        for (name, value) in exposed.names.iter().zip(items) {
            if name.host == exposed.service.host {
                let what = format!(
                    "is `{name}`, which has the service's own host: its own name wins, so this \
                     one is never used"
                );
                value.error(what, "another name, or remove it");
                continue;
            }
            let taken = services.get(name.host.as_str()).into_iter().flatten();
            let other =
                taken.clone().find(|o| o.service != exposed.service && o.service.overlaps(name));
            if let Some(other) = other {
                let what = format!(
                    "is `{name}`, which is itself the service exposed on line {}",
                    other.line.number()
                );
                value.error(what, "a name that no service has");
            }
            let earlier = given.entry(&name.host).or_default();
            let twice = earlier
                .iter()
                .find(|(n, service, _)| **service != exposed.service && n.overlaps(name));
            if let Some((_, service, line)) = twice {
                let what = format!("is `{name}`, which line {line} gives to `{service}`");
                value.error(what, "another name for one of them");
            }
            earlier.push((name, &exposed.service, value.line()));
        }
    }
}
