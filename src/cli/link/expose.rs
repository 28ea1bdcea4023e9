//! `strait expose`: the exposure of a service in its cluster, and the service in those of its
//! peers.

use std::fmt::Write as _;

use anyhow::bail;

use super::{GATEWAY_ACCOUNT, Output, Part, list, managed_gateway, object_name, quoted};
use crate::cli::text::print;
use crate::config::{HostPort, arguments};

/// First port that a process may bind without a capability.
const UNPRIVILEGED_PORT: u16 = 1024;
/// Difference between a privileged port of a service and that of its binding: 80 becomes 8080.
const LOCAL_PORTS: u16 = 8000;

/// Prints the configuration that exposes a service to other clusters, for its gateways and for the
/// meshes of its peers.
///
/// Exits 1 if the service is not NAME.NAMESPACE.SUFFIX or an account is in no `--namespace`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    strait expose echo.app.svc.cluster.local:80 --of east --to west\n  \
    strait expose echo.app.svc.cluster.local:80 --of east --to west --namespace shop \
    --gateway istio-system/eastwest --tunnels 100 --kubernetes")]
pub(in crate::cli) struct ExposeArgs {
    /// Hostname and port of the service.
    #[arg(value_parser = arguments::service)]
    service: HostPort,
    /// Cluster of the service.
    #[arg(long, value_name = "CLUSTER", value_parser = arguments::cluster)]
    of: String,
    /// Network of the service; that of the cluster's name by default.
    #[arg(long, value_parser = arguments::network)]
    network: Option<String>,
    /// Cluster whose peers may use it; any number.
    #[arg(long, value_name = "CLUSTER", required = true, value_parser = arguments::cluster)]
    to: Vec<String>,
    /// Namespace of the peers; any number, all by default.
    #[arg(long, value_parser = arguments::namespace)]
    namespace: Vec<String>,
    /// Service account of the peers, as NAMESPACE/NAME; any number, all by default.
    #[arg(long, value_name = "ACCOUNT", value_parser = arguments::account)]
    service_account: Vec<(String, String)>,
    /// Service account of the peers' gateways, as NAMESPACE/NAME; any number. Bindings use the
    /// service with the identity of their gateway, which `--namespace` and `--service-account` do
    /// not admit.
    #[arg(long, value_name = "ACCOUNT", value_parser = arguments::account)]
    gateway: Vec<(String, String)>,
    /// Limit of concurrent tunnels.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    tunnels: Option<u32>,
    /// Number of instances, by which peers weigh the network of the service.
    #[arg(long, default_value_t = 1)]
    instances: u32,
    #[command(flatten)]
    output: Output,
}

/// Prints the configuration of an exposure.
pub(in crate::cli) fn expose(args: &ExposeArgs) -> anyhow::Result<()> {
    print(text_of_exposure(args)?)
}

pub(super) fn text_of_exposure(args: &ExposeArgs) -> anyhow::Result<String> {
    let service = &args.service;
    let mut labels = service.host.splitn(3, '.');
    let (Some(name), Some(namespace), Some(_), Some(port)) =
        (labels.next(), labels.next(), labels.next(), service.port)
    else {
        bail!("{service} is not NAME.NAMESPACE.SUFFIX:PORT; write that of the service");
    };
    let mut accounts = args.service_account.iter();
    let is_outside = |of: &String| !args.namespace.is_empty() && !args.namespace.contains(of);
    if let Some((of, account)) = accounts.find(|(of, _)| is_outside(of)) {
        bail!(
            "--service-account {of}/{account} is in no --namespace, so it admits no peer; write \
             --namespace {of} too, or no --namespace"
        );
    }
    let known = Known { name, namespace, port };
    let output = &args.output;
    let mut parts = vec![output.sections(&args.of, &exposure(args))];
    if output.kubernetes {
        let network = args.network.as_ref().unwrap_or(&args.of);
        parts.push(managed_gateway(&args.of, network, GATEWAY_ACCOUNT));
    }
    for cluster in &args.to {
        parts.push(output.sections(cluster, &consumer(args, cluster, known.port)));
        let text = if output.kubernetes {
            service_entry(args, cluster, &known)
        } else {
            mesh_file(args, cluster, &known)
        };
        let cluster = cluster.clone();
        parts.push(Part { cluster, text });
    }
    output.join(&parts)
}

/// Parts of the service's hostname.
struct Known<'a> {
    name: &'a str,
    namespace: &'a str,
    port: u16,
}

/// Returns the entry of `exposure.services`.
fn exposure(args: &ExposeArgs) -> String {
    let service = quoted(&args.service.to_string());
    let mut text = format!("exposure:\n  services:\n    - service: {service}\n      to:\n");
    let is_limited = !args.namespace.is_empty() || !args.service_account.is_empty();
    let accounts = |all: &[(String, String)]| {
        let accounts = all.iter().map(|(of, name)| format!("{of}/{name}"));
        ("service_accounts", accounts.collect())
    };
    let namespaces = ("namespaces", args.namespace.clone());
    let clients = [namespaces, accounts(&args.service_account)];
    let gateways = [accounts(&args.gateway)];
    for cluster in &args.to {
        text += &audience(cluster, &clients);
        if is_limited && !args.gateway.is_empty() {
            text += &audience(cluster, &gateways);
        } else if is_limited {
            text += "        # A binding needs its gateway here: --gateway NAMESPACE/NAME\n";
        }
    }
    if let Some(tunnels) = args.tunnels {
        let _ = writeln!(text, "      limits: {{tunnels: {tunnels}}}");
    }
    text
}

/// Returns the ways to the service through the gateways of a peer: transit for clients in its mesh,
/// or a binding, as a comment, for other clients beside the gateway.
fn consumer(args: &ExposeArgs, cluster: &str, port: u16) -> String {
    let service = quoted(&args.service.to_string());
    let local_port = if port < UNPRIVILEGED_PORT { port.saturating_add(LOCAL_PORTS) } else { port };
    format!(
        "# Clients in the mesh use the service through this gateway by transit
exposure:
  services:
    - service: {service}
      to:
{audience}      transit: always
# Clients without a mesh, on the host of this gateway, use a binding instead
# bindings:
#   - service: {service}
#     cluster: {of}
#     listen: \"127.0.0.1:{local_port}\"
",
        audience = audience(cluster, &[]),
        of = quoted(&args.of),
    )
}

/// Returns an entry of `to` for peers of a cluster, with the lists that are not empty.
fn audience(cluster: &str, limits: &[(&str, Vec<String>)]) -> String {
    let limits = limits.iter().filter(|(_, values)| !values.is_empty());
    let limits = limits.map(|(key, values)| format!(", {key}: {}", list(values.iter().cloned())));
    let limits: String = limits.collect();
    format!("        - {{cluster: {}{limits}}}\n", quoted(cluster))
}

/// Returns the service with its instances in the mesh file of a peer.
fn mesh_file(args: &ExposeArgs, cluster: &str, known: &Known<'_>) -> String {
    let Known { name, namespace, port } = known;
    let host = &args.service.host;
    let network = args.network.as_ref().unwrap_or(&args.of);
    format!(
        "# Mesh file of the gateways of cluster {cluster}
services:
  - name: {service}
    namespace: {in_namespace}
    hostname: {hostname}
    vips: []
    ports: {{{port}: {port}}}
workloads:
  - uid: {uid}
    namespace: {in_namespace}
    clusterId: {of}
    network: {network}
    workloadIps: []
    protocol: HBONE
    capacity: {capacity}
    services: {{{reference}: {{{port}: {port}}}}}
",
        service = quoted(name),
        in_namespace = quoted(namespace),
        hostname = quoted(host),
        uid = quoted(&format!("{}/{host}:{port}", args.of)),
        of = quoted(&args.of),
        network = quoted(network),
        capacity = args.instances,
        reference = quoted(&format!("{namespace}/{host}")),
    )
}

/// Returns the ServiceEntry by which istiod of a peer knows the service behind the gateways of its
/// network.
fn service_entry(args: &ExposeArgs, cluster: &str, known: &Known<'_>) -> String {
    let Known { namespace, port, .. } = known;
    let host = &args.service.host;
    let network = args.network.as_ref().unwrap_or(&args.of);
    format!(
        "# In cluster {cluster}
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata:
  name: {entry}
  namespace: {in_namespace}
spec:
  hosts: [{hostname}]
  location: MESH_INTERNAL
  resolution: STATIC
  ports:
    - name: tcp-{port}
      number: {port}
      protocol: TCP
  endpoints:
    - network: {network}
      weight: {weight}
",
        entry = quoted(&object_name(&format!("{host}-{port}-of-{}", args.of))),
        in_namespace = quoted(namespace),
        hostname = quoted(host),
        network = quoted(network),
        weight = args.instances,
    )
}
