//! `strait link` and `strait expose`: configuration for both sides of a link, and of a service that
//! one cluster exposes to others.

mod expose;
#[cfg(test)]
mod tests;

use std::fmt::Write as _;

use anyhow::bail;
use aws_lc_rs::digest::{SHA256, digest};

use crate::config::{HostPort, arguments, parse_identity};
use crate::wire::HBONE_PORT;

pub(super) use expose::{ExposeArgs, expose};

/// Prints the configuration that links two clusters, for the gateways of both.
///
/// A link lets peers of the first cluster use the gateways of the second one, for services that are
/// exposed to them (`strait expose`).
///
/// Exits 1 if a cluster lacks a value that its peer needs.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    strait link west,domain=west.local east,domain=east.local,gateway=203.0.113.10:15008\n  \
    strait link --both --kubernetes west,domain=west.local,gateway=198.51.100.7 \
    east,domain=east.local,gateway=203.0.113.10")]
pub(super) struct LinkArgs {
    /// Cluster whose peers open tunnels, as NAME[,KEY=VALUE]...: `domain` (trust domain), `network`
    /// (the name of the cluster by default), `gateway` (HOST or HOST:PORT, any number), `identity`
    /// (that of its gateways).
    #[arg(value_parser = Side::parse)]
    from: Side,
    /// Cluster whose gateways they use.
    #[arg(value_parser = Side::parse)]
    to: Side,
    /// Links both directions.
    #[arg(long)]
    both: bool,
    /// Prints manifests of Kubernetes, and the parts of strait.yaml as comments.
    #[arg(long)]
    kubernetes: bool,
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
    print!("{}", text_of_link(args)?);
    Ok(())
}

fn text_of_link(args: &LinkArgs) -> anyhow::Result<String> {
    let LinkArgs { from, to, both, .. } = args;
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
    let mut text = String::new();
    let sides = [(to, from, *both), (from, to, true)];
    for (side, peer, opens) in sides {
        if opens && peer.gateways.is_empty() {
            let name = &peer.cluster;
            bail!("cluster {name} has no gateway; write {name},gateway=HOST:PORT");
        }
        let receives = *both || side.cluster == to.cluster;
        let config = strait_yaml(args, (side, peer), receives, opens);
        let cluster = &side.cluster;
        if args.kubernetes {
            text += &to_merge(cluster, &config);
            if opens {
                text += &remote_gateways(cluster, peer);
            }
        } else {
            let _ = writeln!(text, "# strait.yaml of the gateways of cluster {cluster}");
            text += &config;
        }
    }
    Ok(text)
}

/// Returns the sections of `strait.yaml` of one side.
fn strait_yaml(
    args: &LinkArgs,
    (side, peer): (&Side, &Side),
    receives: bool,
    opens: bool,
) -> String {
    let mut text = "trust:\n  domains:\n".to_owned();
    for one in [side, peer] {
        let (name, cluster) = (quoted(&one.trust_domain), quoted(&one.cluster));
        let _ = writeln!(text, "    - {{name: {name}, cluster: {cluster}}}");
    }
    if let Some(identity) = peer.identity.as_deref().filter(|_| receives) {
        let _ = writeln!(text, "  gateways: [{}]", quoted(identity));
    }
    if receives {
        text += "links:\n";
        let link = (&args.from.cluster, &args.to.cluster);
        let back = args.both.then_some((link.1, link.0));
        for (from, to) in [link].into_iter().chain(back) {
            let _ = writeln!(text, "  - {{from: {}, to: {}}}", quoted(from), quoted(to));
        }
    }
    if opens {
        let (name, cluster) = (quoted(&peer.network), quoted(&peer.cluster));
        let _ = writeln!(text, "networks:\n  - name: {name}\n    cluster: {cluster}");
        // In Kubernetes istiod has them by a Gateway.
        if !args.kubernetes {
            let gateways = peer.gateways.iter().map(ToString::to_string);
            let _ = writeln!(text, "    gateways: {}", list(gateways));
        }
        if let Some(identity) = &peer.identity {
            let _ = writeln!(text, "    identities: [{}]", quoted(identity));
        }
    }
    text
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

/// Returns the manifests by which istiod of `cluster` knows the gateways of the peer, as
/// `deploy/kubernetes/istio/remote.yaml`.
fn remote_gateways(cluster: &str, peer: &Side) -> String {
    let mut text = String::new();
    for (index, gateway) in peer.gateways.iter().enumerate() {
        let name = match index {
            0 => format!("eastwest-of-{}", peer.cluster),
            _ => format!("eastwest-{index}-of-{}", peer.cluster),
        };
        let kind = if gateway.is_address() {
            "IPAddress"
        } else {
            "Hostname"
        };
        let account = peer.identity.as_deref().and_then(parse_identity);
        let account = account.map_or(["istio-system", "eastwest"], |[_, rest @ ..]| rest);
        let [namespace, account] = account;
        let _ = write!(
            text,
            "---
# In cluster {cluster}
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
  listeners:
    - name: mesh
      port: {port}
      protocol: HBONE
      tls:
        mode: Terminate
        options:
          gateway.istio.io/tls-terminate-mode: ISTIO_MUTUAL
",
            name = quoted(&object_name(&name)),
            network = quoted(&peer.network),
            namespace = quoted(namespace),
            account = quoted(account),
            value = quoted(&gateway.host),
            port = gateway.port.unwrap_or(HBONE_PORT),
        );
    }
    text
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
