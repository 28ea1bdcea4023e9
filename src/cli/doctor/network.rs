//! Checks of control planes, DNS, and the gateways of other networks.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use humantime::format_rfc3339_seconds;
use rustix::net::sockopt::{ip_mtu, ipv6_mtu};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::finding::Finding;
use super::host::MTU_MIN;
use crate::app::{self, Inputs, control_planes};
use crate::config::Examined;
use crate::datapath::dial::DenyList;
use crate::grpc::channel;
use crate::grpc::goaway::GoAwayCode;
use crate::outer::{AddressFilter, Failure, Reached, Target, reach};
use crate::snapshot::Publisher;
use crate::snapshot::builder::Change;
use crate::tls::{self, IdentityMaterial, InboundTls, PeerTrust, TlsError};
use crate::xds::dns;

const PLANE: &str = "control plane";
const GATEWAY: &str = "gateway";
const DNS: &str = "dns";

/// Deadline for a control plane.
const DEADLINE: Duration = Duration::from_secs(6);
/// Limits of the gateways that are dialled, and of those at the same time.
const GATEWAYS_MAX: usize = 256;
const PARALLEL_MAX: usize = 16;

/// Causes of failed connections to a control plane, each with the remedy. The last one is any.
const PLANE_REMEDIES: [(&str, &str); 7] = [
    ("UnknownIssuer", "write the roots of its issuer into `roots`"),
    ("not valid for name", "write a name of its certificate into `san`"),
    ("not valid yet", "synchronize the clocks of both hosts"),
    ("expired", "have its certificate renewed"),
    ("lookup", "correct the name in `address`, or the resolver of this host"),
    ("certificate", "compare its certificate with `roots` and `san`"),
    ("", "open the way to it: its Service, NetworkPolicies and firewalls"),
];

/// Remedies for gateways by reason and detail.
const GATEWAY_REMEDIES: [(&str, &str); 17] = [
    ("path MTU", "let packets of the full length pass, or set `net.ipv4.tcp_mtu_probing` to 2"),
    ("peer_rejected_us", "add the own root and trust domain to the trust of that gateway"),
    ("not_yet_valid", "synchronize the clocks of both hosts"),
    ("expired", "renew the certificate of that gateway"),
    ("unknown_issuer", "add the root of its mesh to `identity.roots` or `trust.domains[].roots`"),
    ("untrusted_domain", "add its trust domain to `trust.domains`"),
    ("untrusted_issuer", "add its issuer to `trust`"),
    ("neither the cluster", "write `cluster` there"),
    ("gateway_untrusted", "correct its address, `cluster` or `identities` in `networks`"),
    ("ALPN", "write its HBONE port, which is 15008 by default"),
    ("ApplicationProtocol", "write its HBONE port, which is 15008 by default"),
    ("corrupt message", "write its HBONE port, which is 15008 by default"),
    ("eof", "write its HBONE port, which is 15008 by default"),
    ("broken pipe", "look at the log of that gateway, which may reject the own certificate"),
    ("reset", "look at the log of that gateway, which may reject the own certificate"),
    ("gateway_unreachable", "open the way there: its load balancer, NetworkPolicies and firewalls"),
    ("", "add its network to `dial.allow`, or correct the address"),
];

/// Connects to each control plane.
pub(super) async fn planes(examined: &Examined) -> Vec<Finding> {
    let (mut known, mut findings) = (BTreeSet::new(), Vec::new());
    for plane in control_planes(examined) {
        let address = plane.address.to_string();
        if !known.insert((address.clone(), plane.roots.to_string())) {
            continue;
        }
        let connected = timeout(DEADLINE, channel::connect(plane, GoAwayCode::default())).await;
        let why = match connected {
            Ok(Ok(_)) => {
                let found = format!("{address} accepts connections and its certificate is trusted");
                findings.push(Finding::ok(PLANE, found));
                continue;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no answer in time".to_owned(),
        };
        let remedy = remedy(&PLANE_REMEDIES, &why);
        let failure = Finding::failure(PLANE, format!("{address}: {why}"), remedy);
        findings.push(failure.of(address));
    }
    findings
}

/// Looks up the names of the mesh, and connects to the gateways of other networks as tunnels do.
pub(super) async fn gateways(inputs: &Inputs, own: Option<&IdentityMaterial>) -> Vec<Finding> {
    let publisher = app::publish(inputs);
    let mut findings = names(inputs, &publisher).await;
    let reader = publisher.reader();
    let snapshot = reader.snapshot();
    let targets = snapshot.remote_gateways().map(|(address, gateway)| Target { address, gateway });
    let targets: Vec<_> = targets.collect();
    let tls = match own.map(|own| served(inputs, own)).transpose() {
        Ok(Some(tls)) => Arc::new(tls),
        _ if targets.is_empty() => return findings,
        _ => {
            let found = format!("{} not dialled: no own certificate is usable", targets.len());
            let remedy = "correct it first; of an issued one, see `strait status peers`";
            findings.push(Finding::warning(GATEWAY, found, remedy));
            return findings;
        }
    };
    if targets.len() > GATEWAYS_MAX {
        let found = format!("only {GATEWAYS_MAX} of {} are dialled", targets.len());
        findings.push(Finding::warning(GATEWAY, found, "see `strait status peers` for all"));
    }
    let deny = DenyList::of(&inputs.config);
    let filter = AddressFilter::new(move |address| deny.check(address));
    let (turns, mut dials) = (Arc::new(Semaphore::new(PARALLEL_MAX)), JoinSet::new());
    for (index, target) in targets.into_iter().take(GATEWAYS_MAX).enumerate() {
        let (tls, reader, filter) = (Arc::clone(&tls), reader.clone(), filter.clone());
        let turns = Arc::clone(&turns);
        dials.spawn(async move {
            let _turn = turns.acquire().await;
            let reached = reach(&target, &tls, (&reader, &filter)).await;
            (index, describe(&target, reached))
        });
    }
    let mut dialled = dials.join_all().await;
    dialled.sort_unstable_by_key(|(index, _)| *index);
    findings.extend(dialled.into_iter().map(|(_, finding)| finding));
    findings
}

/// Returns the TLS of connections to gateways.
fn served(inputs: &Inputs, own: &IdentityMaterial) -> Result<InboundTls, TlsError> {
    let trust = PeerTrust::load(&inputs.config.trust)?;
    Ok(InboundTls::new(tls::listener_server_config(own, &trust)?))
}

/// Looks up all names that stand for addresses, and publishes the addresses.
async fn names(inputs: &Inputs, publisher: &Publisher) -> Vec<Finding> {
    let known: Vec<_> = publisher.reader().snapshot().hosts.known.keys().cloned().collect();
    let (turns, mut lookups) = (Arc::new(Semaphore::new(PARALLEL_MAX)), JoinSet::new());
    for name in known.into_iter().take(GATEWAYS_MAX) {
        let (turns, servers) = (Arc::clone(&turns), inputs.config.dns.servers.clone());
        lookups.spawn(async move {
            let _turn = turns.acquire().await;
            let found = dns::look_up(&servers, &name).await;
            (name, found)
        });
    }
    let (mut findings, mut answers) = (Vec::new(), Vec::new());
    for (name, found) in lookups.join_all().await {
        match found {
            Ok(addresses) => {
                findings.push(Finding::ok(DNS, format!("{name} is {addresses:?}")));
                answers.push((name, addresses.into()));
            }
            Err(error) => findings.push(Finding::failure(
                DNS,
                format!("{name}: {error}"),
                "correct the name, its record, or `dns.servers`",
            )),
        }
    }
    publisher.update(Change { answers, ..Change::default() });
    findings.sort_by(|one, other| one.found.cmp(&other.found));
    findings
}

/// Describes the result of dialling a gateway.
fn describe(target: &Target, reached: Result<Reached, Failure>) -> Finding {
    let Target { address, gateway } = target;
    let network = &gateway.network;
    match reached {
        Ok(Reached { identity, not_after }) => {
            let until = format_rfc3339_seconds(not_after);
            let found = format!("{address} of network {network} is {identity} until {until}");
            with_mtu(found, path_mtu(*address))
        }
        Err(Failure { reason, detail }) => {
            let what = format!("{reason}: {detail}");
            let remedy = remedy(&GATEWAY_REMEDIES, &what);
            let found = format!("network {network}: {detail}");
            Finding::failure(GATEWAY, found, remedy).of(network)
        }
    }
}

/// Judges the MTU of the path to a gateway that answers.
fn with_mtu(found: String, mtu: Option<u32>) -> Finding {
    let Some(mtu) = mtu else { return Finding::ok(GATEWAY, found) };
    let found = format!("{found}, path MTU {mtu}");
    if u64::from(mtu) < MTU_MIN {
        let remedy = format!("let packets of {MTU_MIN} bytes pass, or large ones may be lost");
        return Finding::warning(GATEWAY, found, remedy);
    }
    Finding::ok(GATEWAY, found)
}

/// Returns the MTU of the path to an address, as the kernel has measured it. Sends nothing.
fn path_mtu(address: SocketAddr) -> Option<u32> {
    let any: IpAddr = match address {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(address).ok()?;
    let mtu = if any.is_ipv4() { ip_mtu(&socket) } else { ipv6_mtu(&socket) };
    mtu.ok()
}

/// Returns the remedy of the first cause that a text contains.
fn remedy(remedies: &[(&str, &'static str)], text: &str) -> &'static str {
    let known = remedies.iter().find(|(cause, _)| text.contains(cause));
    known.map_or("", |(_, remedy)| remedy)
}

#[cfg(test)]
mod tests {
    use super::super::finding::Outcome;
    use super::*;

    #[test]
    fn a_small_mtu_of_the_path_is_a_warning() {
        for (mtu, outcome, found) in [
            (None, Outcome::Ok, "g"),
            (Some(1280), Outcome::Ok, "g, path MTU 1280"),
            (Some(1279), Outcome::Warning, "g, path MTU 1279"),
        ] {
            let finding = with_mtu("g".to_owned(), mtu);
            assert_eq!((finding.outcome, &*finding.found), (outcome, found));
        }
    }
}
