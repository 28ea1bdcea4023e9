//! `strait link` and `strait expose`: configuration for both sides of a link, and of a service that
//! one cluster exposes to others.

mod expose;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fmt::Write as _;

use anyhow::bail;
use aws_lc_rs::digest::{SHA256, digest};

use crate::cli::text::print;
use crate::config::{HostPort, arguments, parse_identity};
use crate::wire::HBONE_PORT;

pub(super) use expose::{ExposeArgs, expose};

/// Namespace and service account of gateways without an identity.
const GATEWAY_ACCOUNT: [&str; 2] = ["istio-system", "eastwest"];
/// First lines of the listener of a Gateway, and the lines after its port.
const HBONE_LISTENER: &str = "  listeners:\n    - name: mesh\n";
const TERMINATE: &str = "      protocol: HBONE
      tls:
        mode: Terminate
        options:
          gateway.istio.io/tls-terminate-mode: ISTIO_MUTUAL
";

/// Prints the configuration that links clusters, for the gateways of each.
///
/// A link lets peers of one cluster use the gateways of another one, for services that are exposed
/// to them (`strait expose`). Without `--both`, peers of the first cluster use the gateways of all
/// others.
///
/// Exits 1 if a cluster lacks a value that its peer needs.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    strait link west,domain=west.local east,domain=east.local,gateway=203.0.113.10:15008\n  \
    strait link --both --kubernetes --for west west,domain=west.local,gateway=198.51.100.7 \
    east,domain=east.local,gateway=203.0.113.10 | kubectl --context west apply -f -")]
pub(super) struct LinkArgs {
    /// Clusters, at least two, each as NAME[,KEY=VALUE]...: `domain` (trust domain), `network`
    /// (the name of the cluster by default), `gateway` (HOST or HOST:PORT, any number), `identity`
    /// (that of its gateways).
    #[arg(required = true, num_args = 2.., value_name = "CLUSTER", value_parser = Side::parse)]
    clusters: Vec<Side>,
    /// Links every two clusters in both directions.
    #[arg(long)]
    both: bool,
    #[command(flatten)]
    output: Output,
}

/// Selection and form of what is printed.
#[derive(Debug, clap::Args)]
struct Output {
    /// Prints manifests of Kubernetes, and the parts of strait.yaml as comments.
    #[arg(long)]
    kubernetes: bool,
    /// Prints the documents of one cluster alone, as for `kubectl apply` there.
    #[arg(long = "for", value_name = "CLUSTER", value_parser = arguments::cluster)]
    only: Option<String>,
}

/// One document of the output.
struct Part {
    /// Cluster that it is for.
    cluster: String,
    text: String,
}

impl Output {
    /// Returns sections of `strait.yaml` of the gateways of a cluster.
    fn sections(&self, cluster: &str, sections: &str) -> Part {
        let text = if self.kubernetes {
            to_merge(cluster, sections)
        } else {
            format!("# strait.yaml of the gateways of cluster {cluster}\n{sections}")
        };
        let cluster = cluster.to_owned();
        Part { cluster, text }
    }

    /// Joins the documents of the selected clusters by `---`.
    fn join(&self, parts: &[Part]) -> anyhow::Result<String> {
        let is_selected = |part: &&Part| self.only.as_ref().is_none_or(|of| *of == part.cluster);
        let texts: Vec<_> = parts.iter().filter(is_selected).map(|part| &*part.text).collect();
        if let (Some(only), true) = (&self.only, texts.is_empty()) {
            let known: BTreeSet<_> = parts.iter().map(|part| &*part.cluster).collect();
            let known: Vec<_> = known.into_iter().collect();
            bail!("nothing is for cluster {only}; write --for with one of {}", known.join(", "));
        }
        Ok(texts.join("---\n"))
    }
}

/// Cluster at one end of a link.
#[derive(Clone, Debug)]
struct Side {
    cluster: String,
    trust_domain: String,
    network: String,
    gateways: Vec<HostPort>,
    identity: Option<String>,
}

impl Side {
    fn parse(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let cluster = parts.next().filter(|name| !name.is_empty());
        let cluster = arguments::cluster(cluster.ok_or("write a cluster's name first")?)?;
        let (mut domain, mut network, mut gateways, mut identity) = (None, None, Vec::new(), None);
        for part in parts {
            match part.split_once('=') {
                Some(("domain", value)) => domain = Some(arguments::domain(value)?),
                Some(("network", value)) => network = Some(arguments::network(value)?),
                Some(("gateway", value)) => {
                    let mut gateway =
                        HostPort::parse(value).map_err(|error| format!("{value:?} {error}"))?;
                    gateway.port.get_or_insert(HBONE_PORT);
                    gateways.push(gateway);
                }
                Some(("identity", value)) => {
                    let [of, ..] = parse_identity(value).ok_or_else(|| {
                        format!("{value:?} is not spiffe://DOMAIN/ns/NAMESPACE/sa/ACCOUNT")
                    })?;
                    identity = Some((of.to_owned(), value.to_owned()));
                }
                _ => {
                    return Err(format!(
                        "unknown part {part:?}; write domain=, network=, gateway= or identity="
                    ));
                }
            }
        }
        let (of, identity) = identity.unzip();
        if let (Some(domain), Some(of)) = (&domain, &of)
            && domain != of
        {
            return Err(format!(
                "`identity` has trust domain {of}, and `domain` is {domain}; write the domain of \
                 the gateways in both"
            ));
        }
        let trust_domain = domain.or(of);
        Ok(Self {
            trust_domain: trust_domain
                .ok_or_else(|| format!("no trust domain; write {cluster},domain=DOMAIN"))?,
            network: network.unwrap_or_else(|| cluster.clone()),
            cluster,
            gateways,
            identity,
        })
    }
}

/// Prints the configuration of a link.
pub(super) fn link(args: &LinkArgs) -> anyhow::Result<()> {
    print(text_of_link(args)?)
}

fn text_of_link(args: &LinkArgs) -> anyhow::Result<String> {
    let clusters = &args.clusters;
    for (index, side) in clusters.iter().enumerate() {
        for other in clusters.iter().take(index) {
            check_pair(other, side)?;
        }
    }
    let mut parts = Vec::new();
    // The side that is used comes first.
    for side in clusters.iter().rev() {
        let view = View::new(args, side);
        if let Some(peer) = view.opens.iter().find(|peer| peer.gateways.is_empty()) {
            let name = &peer.cluster;
            bail!("cluster {name} has no gateway; write {name},gateway=HOST:PORT");
        }
        parts.push(args.output.sections(&side.cluster, &view.strait_yaml(args)));
        if args.output.kubernetes {
            let own = (!view.receives.is_empty())
                .then(|| managed_gateway(&side.cluster, &side.network, gateway_account(side)));
            let peers = view.opens.iter();
            let remote = peers.flat_map(|peer| remote_gateways(&side.cluster, peer));
            parts.extend(own.into_iter().chain(remote));
        }
    }
    args.output.join(&parts)
}

fn check_pair(from: &Side, to: &Side) -> anyhow::Result<()> {
    if from.cluster == to.cluster {
        bail!("both sides are cluster {}; write two clusters", to.cluster);
    }
    if from.trust_domain == to.trust_domain {
        bail!(
            "both clusters have trust domain {}: only issuers tell their peers apart; write \
             `trust.clusters` by `strait trust issuers`",
            to.trust_domain
        );
    }
    Ok(())
}

/// One cluster with the clusters that it is linked to.
struct View<'a> {
    own: &'a Side,
    /// Clusters whose gateways its peers use.
    opens: Vec<&'a Side>,
    /// Clusters whose peers use its gateways.
    receives: Vec<&'a Side>,
}

impl<'a> View<'a> {
    fn new(args: &'a LinkArgs, own: &'a Side) -> Self {
        let is_first = |side: &Side| {
            let first = args.clusters.first();
            first.is_some_and(|first| first.cluster == side.cluster)
        };
        let others = || args.clusters.iter().filter(|side| side.cluster != own.cluster);
        let opens = others().filter(|_| args.both || is_first(own));
        let receives = others().filter(|side| args.both || is_first(side));
        Self { own, opens: opens.collect(), receives: receives.collect() }
    }

    fn strait_yaml(&self, args: &LinkArgs) -> String {
        let own = self.own;
        let mut text = "trust:\n  domains:\n".to_owned();
        let is_peer = |side: &&Side| {
            let mut peers = self.opens.iter().chain(&self.receives);
            peers.any(|peer| peer.cluster == side.cluster)
        };
        let peers = args.clusters.iter().filter(is_peer);
        for one in [own].into_iter().chain(peers) {
            let (name, cluster) = (quoted(&one.trust_domain), quoted(&one.cluster));
            let _ = writeln!(text, "    - {{name: {name}, cluster: {cluster}}}");
        }
        let gateways: Vec<_> =
            self.receives.iter().filter_map(|peer| peer.identity.clone()).collect();
        if !gateways.is_empty() {
            let _ = writeln!(text, "  gateways: {}", list(gateways));
        }
        if !self.receives.is_empty() {
            text += "links:\n";
            let clusters = &args.clusters;
            let pairs = clusters.iter().flat_map(|from| clusters.iter().map(move |to| [from, to]));
            let is_linked = |[from, to]: &[&Side; 2]| {
                let is_own = |side: &Side| side.cluster == own.cluster;
                let ends = (is_own(from), is_own(to));
                let peers =
                    |side: &Side| self.receives.iter().any(|one| one.cluster == side.cluster);
                (ends == (false, true) && peers(from)) || (ends == (true, false) && args.both)
            };
            for [from, to] in pairs.filter(is_linked) {
                let (from, to) = (quoted(&from.cluster), quoted(&to.cluster));
                let _ = writeln!(text, "  - {{from: {from}, to: {to}}}");
            }
        }
        if !self.opens.is_empty() {
            text += "networks:\n";
        }
        for peer in &self.opens {
            let (name, cluster) = (quoted(&peer.network), quoted(&peer.cluster));
            let _ = writeln!(text, "  - name: {name}\n    cluster: {cluster}");
            // In Kubernetes istiod has them by a Gateway.
            if !args.output.kubernetes {
                let gateways = peer.gateways.iter().map(ToString::to_string);
                let _ = writeln!(text, "    gateways: {}", list(gateways));
            }
            if let Some(identity) = &peer.identity {
                let _ = writeln!(text, "    identities: [{}]", quoted(identity));
            }
        }
        text
    }
}

/// Returns sections of `strait.yaml` as comments beside manifests. A ConfigMap with them would
/// replace the sections of other links and services.
fn to_merge(cluster: &str, sections: &str) -> String {
    let mut text = format!("# To merge into strait.yaml of the gateways of cluster {cluster}\n");
    for line in sections.lines() {
        let _ = writeln!(text, "# {line}");
    }
    text
}

/// Returns a text as the name of an object (RFC 1123, short enough for a label). An invalid text is
/// replaced by its valid characters and a part of its hash, so that different texts stay different.
fn object_name(text: &str) -> String {
    const BYTES_MAX: usize = 63;
    const HASH_BYTES: usize = 4;
    let is_valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let is_label = |label: &str| {
        let has_ends = !label.starts_with('-') && !label.ends_with('-');
        !label.is_empty() && has_ends && label.chars().all(is_valid)
    };
    if text.len() <= BYTES_MAX && text.split('.').all(is_label) {
        return text.to_owned();
    }
    let lower = text.chars().map(|c| c.to_ascii_lowercase());
    let valid = lower.map(|c| if is_valid(c) { c } else { '-' });
    let valid: String = valid.take(BYTES_MAX - 1 - 2 * HASH_BYTES).collect();
    let hash = digest(&SHA256, text.as_bytes());
    let hash = hash.as_ref().iter().take(HASH_BYTES);
    let hash: String = hash.map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{hash}", valid.trim_matches('-'))
}

/// Returns namespace and service account of the gateways of a cluster.
fn gateway_account(side: &Side) -> [&str; 2] {
    let account = side.identity.as_deref().and_then(parse_identity);
    account.map_or(GATEWAY_ACCOUNT, |[_, rest @ ..]| rest)
}

/// Returns the Gateway of which istiod makes the gateways of a cluster, with the label by which
/// other clusters know its network.
fn managed_gateway(cluster: &str, network: &str, [namespace, name]: [&str; 2]) -> Part {
    let text = format!(
        "# In cluster {cluster}, whose system namespace has the same label of the network
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata:
  name: {name}
  namespace: {namespace}
  labels:
    topology.istio.io/network: {network}
spec:
  gatewayClassName: istio-east-west
  infrastructure:
    parametersRef:
      group: \"\"
      kind: ConfigMap
      name: strait
{HBONE_LISTENER}      port: {HBONE_PORT}
{TERMINATE}",
        name = quoted(name),
        namespace = quoted(namespace),
        network = quoted(network),
    );
    let cluster = cluster.to_owned();
    Part { cluster, text }
}

/// Returns the manifests by which istiod of `cluster` knows the gateways of the peer, as
/// `deploy/kubernetes/istio/remote.yaml`.
fn remote_gateways(cluster: &str, peer: &Side) -> Vec<Part> {
    let gateways = peer.gateways.iter().enumerate();
    let parts = gateways.map(|(index, gateway)| {
        let name = match index {
            0 => format!("eastwest-of-{}", peer.cluster),
            _ => format!("eastwest-{index}-of-{}", peer.cluster),
        };
        let kind = if gateway.is_address() { "IPAddress" } else { "Hostname" };
        let [namespace, account] = gateway_account(peer);
        let text = format!(
            "# In cluster {cluster}
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata:
  name: {name}
  namespace: {namespace}
  labels:
    topology.istio.io/network: {network}
  annotations:
    gateway.istio.io/service-account: {account}
spec:
  gatewayClassName: istio-remote
  addresses:
    - type: {kind}
      value: {value}
{HBONE_LISTENER}      port: {port}
{TERMINATE}",
            name = quoted(&object_name(&name)),
            network = quoted(&peer.network),
            namespace = quoted(namespace),
            account = quoted(account),
            value = quoted(&gateway.host),
            port = gateway.port.unwrap_or(HBONE_PORT),
        );
        let cluster = cluster.to_owned();
        Part { cluster, text }
    });
    parts.collect()
}

/// Returns a text as YAML, in quotes.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Returns texts as a YAML list.
fn list(texts: impl IntoIterator<Item = String>) -> String {
    let texts: Vec<_> = texts.into_iter().map(|text| quoted(&text)).collect();
    format!("[{}]", texts.join(", "))
}
