//! Conversion of assignments, from EDS or inline in a cluster, to workloads and load balancing.
//!
//! An invalid field rejects the whole assignment. Endpoints that only Envoy can dial are left
//! out with a note: unix sockets, internal listeners, UDP, named ports and custom resolvers.
//! Ignored are `named_endpoints` (only a reference to one is rejected), `additional_addresses`,
//! `proximity`, `endpoint_stale_after` and health check settings.
//!
//! UNKNOWN and HEALTHY endpoints are ready, DEGRADED ones only if no other is, others never.
//! Endpoints have weight 1 by default, localities none. Metadata
//! `envoy.transport_socket_match: {tunnel: http}` means HBONE; [`original_destination`],
//! [`set_names`] and [`pod_labels`] read the rest.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use prost_types::value::Kind;

use crate::grpc::core::address::Address;
use crate::grpc::core::socket_address::{PortSpecifier, Protocol as Transport};
use crate::grpc::core::{self, HealthStatus, Metadata};
use crate::grpc::endpoint as proto;
use crate::grpc::endpoint::cluster_load_assignment::{Policy, policy::DropOverload};
use crate::grpc::endpoint::lb_endpoint::HostIdentifier;
use crate::grpc::endpoint::locality_lb_endpoints::LbConfig;
use crate::grpc::number::fractional_percent::DenominatorType;
use crate::snapshot::mesh::{
    GatewayAddress, Locality, Place, PodLabels, Protocol, Template, Workload,
};
use crate::wire::label::{POD_LABELS_MAX, is_label};
use crate::wire::{Authority, Host};
use crate::xds::convert::{At as _, check_length, each, shown};
use crate::xds::interner::Interner;

/// Limit of the localities of an assignment, at all priorities.
pub(super) const LOCALITIES_MAX: usize = 10_000;
/// Limit of the endpoints of an assignment. Each has a few bytes on the wire and some 500 in
/// memory.
pub(super) const ENDPOINTS_MAX: usize = 100_000;
/// Limit of drop overloads.
const DROPS_MAX: usize = 64;
/// Highest priority that Envoy accepts.
const PRIORITY_MAX: u32 = 128;
/// Envoy's default overprovisioning factor, in percent.
const OVERPROVISIONING: u32 = 140;
/// Denominator of drop overloads.
const MILLION: u32 = 1_000_000;
/// Limit of the unused endpoints and settings of an assignment that the status lists
/// individually.
const UNUSED_KEPT: usize = 20;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Endpoints {
    /// Key, workload and target port of each endpoint. The workloads have no uid and no service
    /// yet.
    pub(super) list: Vec<(String, Workload, u16)>,
    /// Weight of each locality that has one, by priority.
    pub(super) localities: BTreeMap<(u32, Arc<Locality>), u32>,
    /// Overprovisioning factor, in percent.
    pub(super) overprovisioning: u32,
    /// Drop overloads: the category, and its parts per million of the tunnels that earlier
    /// categories leave.
    pub(super) drops: Vec<(Arc<str>, u32)>,
    /// Reasons for which parts of the assignment are unused, up to [`UNUSED_KEPT`].
    pub(super) unused: Vec<String>,
    pub(super) unused_count: usize,
}

impl Default for Endpoints {
    fn default() -> Self {
        Self {
            list: Vec::new(),
            localities: BTreeMap::new(),
            overprovisioning: OVERPROVISIONING,
            drops: Vec::new(),
            unused: Vec::new(),
            unused_count: 0,
        }
    }
}

pub(super) fn endpoints(
    from: proto::ClusterLoadAssignment,
    interner: &mut Interner,
) -> Result<Endpoints, String> {
    let mut read = policy(from.policy.unwrap_or_default()).at("policy")?;
    let mut seen = HashSet::new();
    let mut sums = HashMap::<u32, u32>::new();
    each("endpoints", from.endpoints, |group| {
        read.add_locality(group, &mut seen, &mut sums, interner)
    })?;
    Ok(read)
}

fn policy(from: Policy) -> Result<Endpoints, String> {
    let overprovisioning = from.overprovisioning_factor.unwrap_or(OVERPROVISIONING);
    if overprovisioning == 0 {
        return Err(".overprovisioning_factor: 0, want at least 1".to_owned());
    }
    check_length(".drop_overloads", from.drop_overloads.len(), DROPS_MAX)?;
    let drops = each(".drop_overloads", from.drop_overloads, convert_drop_overload)?;
    let mut read = Endpoints { overprovisioning, drops, ..Endpoints::default() };
    if from.weighted_priority_health {
        read.note_unused(
            "weighted_priority_health: ignored, all endpoints count equally".to_owned(),
        );
    }
    Ok(read)
}

/// Converts a drop overload to its category and parts per million, at most all.
fn convert_drop_overload(from: DropOverload) -> Result<(Arc<str>, u32), String> {
    if from.category.is_empty() {
        return Err(".category: empty".to_owned());
    }
    let of = from.drop_percentage.unwrap_or_default();
    let scale = match DenominatorType::try_from(of.denominator) {
        Ok(DenominatorType::Hundred) => MILLION / 100,
        Ok(DenominatorType::TenThousand) => MILLION / 10_000,
        Ok(DenominatorType::Million) => 1,
        Err(_) => {
            return Err(format!(".drop_percentage.denominator: {} is unknown", of.denominator));
        }
    };
    let parts = of.numerator.saturating_mul(scale).min(MILLION);
    Ok((from.category.into(), parts))
}

impl Endpoints {
    fn add_locality(
        &mut self,
        from: proto::LocalityLbEndpoints,
        seen: &mut HashSet<String>,
        sums: &mut HashMap<u32, u32>,
        interner: &mut Interner,
    ) -> Result<(), String> {
        match from.lb_config {
            Some(LbConfig::LoadBalancerEndpoints(_)) => {
                return Err(".load_balancer_endpoints: not supported, want lb_endpoints".into());
            }
            Some(LbConfig::LedsClusterLocalityConfig(_)) => {
                let field = ".leds_cluster_locality_config";
                return Err(format!("{field}: not supported, want lb_endpoints"));
            }
            None => {}
        }
        let priority = from.priority;
        if priority > PRIORITY_MAX {
            return Err(format!(".priority: {priority}, want at most {PRIORITY_MAX}"));
        }
        let locality = from.locality.unwrap_or_default();
        let locality =
            interner.share_locality(&locality.region, &locality.zone, &locality.sub_zone);
        if let Some(weight) = from.load_balancing_weight {
            self.set_locality_weight(priority, &locality, weight, sums)
                .at(".load_balancing_weight")?;
        }
        let mut sum = 0_u32;
        each(".lb_endpoints", from.lb_endpoints, |one| {
            let weight = one.load_balancing_weight.unwrap_or(1);
            let added = sum.checked_add(weight).filter(|_| weight > 0);
            sum = added.ok_or_else(|| match weight {
                0 => ".load_balancing_weight: 0, want at least 1".to_owned(),
                _ => format!(
                    ".load_balancing_weight: {weight}, and the sum of its locality is over {}",
                    u32::MAX
                ),
            })?;
            let mut workload = Workload {
                capacity: weight,
                priority,
                template: Template { locality: Arc::clone(&locality), ..Template::default() }
                    .into(),
                ..Workload::default()
            };
            set_health(one.health_status, &mut workload);
            let metadata = one.metadata.unwrap_or_default();
            set_names(&metadata, &mut workload, interner);
            self.add(one.host_identifier, &metadata, workload, seen, interner)
        })?;
        Ok(())
    }

    /// Records the weight of a locality. As in Envoy, the last of several weights counts.
    fn set_locality_weight(
        &mut self,
        priority: u32,
        locality: &Arc<Locality>,
        weight: u32,
        sums: &mut HashMap<u32, u32>,
    ) -> Result<(), String> {
        if weight == 0 {
            return Err("0, want at least 1".to_owned());
        }
        let sum = sums.entry(priority).or_default();
        *sum = sum
            .checked_add(weight)
            .ok_or_else(|| format!("{weight}, and the sum of its priority is over {}", u32::MAX))?;
        self.localities.insert((priority, Arc::clone(locality)), weight);
        Ok(())
    }

    fn add(
        &mut self,
        from: Option<HostIdentifier>,
        metadata: &Metadata,
        mut workload: Workload,
        seen: &mut HashSet<String>,
        interner: &mut Interner,
    ) -> Result<(), String> {
        let endpoint = match from {
            Some(HostIdentifier::Endpoint(endpoint)) => endpoint,
            Some(HostIdentifier::EndpointName(_)) => {
                return Err(".endpoint_name: not supported, want endpoint".to_owned());
            }
            None => return Err(".endpoint: missing".to_owned()),
        };
        let address = endpoint.address.and_then(|address| address.address);
        let address = address.ok_or(".endpoint.address: missing or unsupported")?;
        let placed = convert_address(address, metadata).at(".endpoint.address")?;
        let (place, port, protocol) = match placed {
            Ok(placed) => placed,
            Err(why) => {
                self.note_unused(why);
                return Ok(());
            }
        };
        workload.protocol = protocol;
        if metadata_string(metadata, "envoy.transport_socket_match", "tunnel") == Some("http") {
            workload.protocol = Protocol::Hbone;
        }
        let address = match place {
            Host::Ip(ip) => {
                workload.addresses = [ip].into();
                if !workload.network.is_empty() {
                    let place = Place::Address(workload.network.to_string(), ip);
                    workload.network_gateway = Some(Arc::new(GatewayAddress { place, port }));
                }
                SocketAddr::new(ip, port).to_string()
            }
            Host::Name(name) => {
                let address = format!("{name}:{port}");
                if workload.network.is_empty() {
                    workload.hostname = (*name).into();
                } else {
                    let place = Place::Name(format!("{}/{name}", workload.network));
                    workload.network_gateway = Some(Arc::new(GatewayAddress { place, port }));
                }
                address
            }
        };
        if workload.workload_name.is_empty() {
            workload.own_name = Some(address.as_str().into());
        }
        let key = endpoint_key(&address, &workload);
        if !seen.insert(key.clone()) {
            self.note_unused(format!("{address}: duplicate"));
            return Ok(());
        }
        let (labels, left_out) = pod_labels(metadata, interner);
        workload.pod_labels = labels;
        if left_out > 0 {
            self.note_unused(format!(
                "{address}: {left_out} labels of envoy.lb are unused, above {POD_LABELS_MAX} or \
                 too long"
            ));
        }
        workload.template = interner.share_template(Arc::unwrap_or_clone(workload.template));
        self.list.push((key, workload, port));
        Ok(())
    }

    fn note_unused(&mut self, why: String) {
        self.unused_count += 1;
        if self.unused.len() < UNUSED_KEPT {
            self.unused.push(why);
        }
    }
}

/// Returns the name of an endpoint that no other one of its assignment has. Istio repeats the
/// address of a gateway in each locality, with the weight of the instances there.
fn endpoint_key(address: &str, workload: &Workload) -> String {
    let (network, priority) = (&workload.network, workload.priority);
    if network.is_empty() {
        return address.to_owned();
    }
    let Locality { region, zone, subzone } = &*workload.locality;
    format!("{address}/{network}/{priority}/{region}/{zone}/{subzone}")
}

/// Address, port and protocol of an endpoint.
type DialTarget = (Host, u16, Protocol);

/// Converts an address. The inner error is the reason for which the gateway cannot dial it.
fn convert_address(
    from: Address,
    metadata: &Metadata,
) -> Result<Result<DialTarget, String>, String> {
    Ok(match from {
        Address::SocketAddress(at) => {
            let read = convert_socket_address(at).at(".socket_address")?;
            read.map(|(place, port)| (place, port, Protocol::Tcp))
        }
        Address::Pipe(pipe) => Err(format!("{} is a unix socket", shown(&pipe.path))),
        Address::EnvoyInternalAddress(internal) => {
            let at = original_destination(metadata);
            let at = at.map(|at| (Host::Ip(at.ip().to_canonical()), at.port(), Protocol::Hbone));
            at.ok_or_else(|| {
                let id = shown(&internal.endpoint_id);
                format!("{id}: internal listener without an original destination")
            })
        }
    })
}

/// Converts a socket address, with errors as in [`convert_address`].
fn convert_socket_address(
    from: core::SocketAddress,
) -> Result<Result<(Host, u16), String>, String> {
    let address = shown(&from.address);
    if from.protocol != i32::from(Transport::Tcp) {
        return Ok(Err(format!("{address} is not TCP")));
    }
    if !from.resolver_name.is_empty() {
        let resolver = shown(&from.resolver_name);
        return Ok(Err(format!("{address}: custom resolver {resolver} is not supported")));
    }
    let port = match from.port_specifier {
        Some(PortSpecifier::PortValue(port)) => port,
        Some(PortSpecifier::NamedPort(name)) => {
            let name = shown(&name);
            return Ok(Err(format!("{address}: named port {name} is not supported")));
        }
        None => 0,
    };
    if port == 0 {
        return Ok(Err(format!("{address} has no port")));
    }
    let port =
        u16::try_from(port).map_err(|_| format!(".port_value: {port}, want at most 65535"))?;
    if let Ok(ip) = from.address.parse::<IpAddr>() {
        return Ok(Ok((Host::Ip(ip.to_canonical()), port)));
    }
    match Authority::parse(&format!("{}:{port}", from.address)).map(|read| read.host) {
        Ok(name @ Host::Name(_)) => Ok(Ok((name, port))),
        _ => Err(format!(".address: {address} is neither an address nor a host name")),
    }
}

/// Sets the health of an endpoint. An unknown status counts as unhealthy.
fn set_health(status: i32, workload: &mut Workload) {
    match HealthStatus::try_from(status) {
        Ok(HealthStatus::Unknown | HealthStatus::Healthy) => workload.healthy = true,
        Ok(HealthStatus::Degraded) => {
            (workload.healthy, workload.degraded) = (true, true);
        }
        _ => workload.healthy = false,
    }
}

fn metadata_string<'a>(metadata: &'a Metadata, filter: &str, key: &str) -> Option<&'a str> {
    let value = metadata.filter_metadata.get(filter)?.fields.get(key)?;
    match value.kind.as_ref()? {
        Kind::StringValue(text) => Some(text),
        _ => None,
    }
}

/// Returns the labels of an endpoint, the text values of `envoy.lb`, by which Envoy selects
/// subsets, and the number of those beyond [`POD_LABELS_MAX`] or the lengths of Kubernetes. No
/// subset by these has the endpoint.
fn pod_labels(metadata: &Metadata, interner: &mut Interner) -> (PodLabels, usize) {
    let fields = metadata.filter_metadata.get("envoy.lb");
    let fields = fields.into_iter().flat_map(|filter| &filter.fields);
    let texts = fields.filter_map(|(key, value)| match value.kind.as_ref()? {
        Kind::StringValue(text) => Some((key, text)),
        _ => None,
    });
    let labels = texts.clone().filter(|(key, text)| is_label(key, text)).take(POD_LABELS_MAX);
    let labels: PodLabels =
        labels.map(|(key, text)| (interner.share(key), interner.share(text))).collect();
    let left_out = texts.count() - labels.len();
    (labels, left_out)
}

/// Returns the destination of the HBONE tunnel to an internal listener, as Istio sets it:
/// `envoy.filters.listener.original_dst: {local: IP:PORT}`.
fn original_destination(metadata: &Metadata) -> Option<SocketAddr> {
    let local = metadata_string(metadata, "envoy.filters.listener.original_dst", "local")?;
    local.parse().ok().filter(|at: &SocketAddr| at.port() != 0)
}

/// Sets the names of a workload from Istio's metadata, `istio: {workload:
/// name;namespace;canonical name;revision;cluster, network: NETWORK}`. Missing parts stay empty,
/// as for unknown workloads in WDS. The address of an endpoint of another network is that of its
/// gateway, and its weight is the number of instances behind it.
fn set_names(metadata: &Metadata, workload: &mut Workload, interner: &mut Interner) {
    let text = metadata_string(metadata, "istio", "workload").unwrap_or_default();
    let mut parts = text.split(';').map(|part| interner.share(part));
    let mut next = || parts.next().unwrap_or_default();
    let template = &mut **workload;
    template.workload_name = next();
    template.namespace = next();
    template.canonical_name = next();
    template.canonical_revision = next();
    template.cluster = next();
    template.network = interner.share(metadata_string(metadata, "istio", "network").unwrap_or(""));
    workload.own_name = Some(Arc::clone(&workload.workload_name));
}
