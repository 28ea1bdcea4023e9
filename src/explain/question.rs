//! Question: the description of a tunnel to explain, as arguments of `strait explain` and as
//! parameters of GET `/explain`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::datapath::http2::tunnel::{Forwarded, Origin};
use crate::wire::GatewayHash;

/// Number of endpoints, and of workloads that cannot be picked, to list unless all are
/// requested.
const ROWS_SHOWN_MAX: usize = 50;

/// Stand-in for the hash of this gateway, which may have no certificate yet.
pub(super) const OWN_HASH: GatewayHash = GatewayHash::new([1; 8]);
const OTHER_HASH: GatewayHash = GatewayHash::new([2; 8]);

/// Description of a tunnel to explain.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Question {
    /// Identity in the peer's certificate. Not for TLS listeners, where the gateway sees none.
    #[arg(long, value_name = "spiffe://TD/ns/NS/sa/SA")]
    pub from: Option<String>,
    /// Cluster of the peer, one of `trust.clusters`, if the issuer of its certificate determines
    /// it; without it an issuer that no cluster has.
    #[arg(long, value_name = "NAME")]
    pub cluster: Option<String>,
    /// Authority of the peer's CONNECT.
    #[arg(long, value_name = "HOST:PORT")]
    pub to: Option<String>,
    /// Server name of the peer's TLS: on a TLS listener, or inside the tunnel if the gateway reads
    /// it. Empty is a ClientHello without one.
    #[arg(long, value_name = "NAME")]
    pub sni: Option<String>,
    /// ALPN protocols that the peer's TLS offers.
    #[arg(long, value_name = "PROTOCOL", value_delimiter = ',')]
    #[serde(
        serialize_with = "join",
        deserialize_with = "split",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub alpn: Vec<String>,
    /// Name of the listener in the configuration; without it the first HBONE listener, or the only
    /// TLS listener.
    #[arg(long, value_name = "NAME")]
    pub listener: Option<String>,
    /// Value of the peer's x-istio-source header.
    #[arg(long, value_name = "WHAT", value_parser = ["waypoint", "gateway"])]
    pub origin: Option<String>,
    /// Value of the peer's x-strait-source header: the first peer of a tunnel through a gateway.
    #[arg(long, value_name = "spiffe://TD/ns/NS/sa/SA[;cluster=NAME]")]
    pub source: Option<String>,
    /// Value of the peer's x-strait-via header: the gateways that the tunnel has passed, each this
    /// gateway (`own`) or another one.
    #[arg(long, value_name = "own|other,…")]
    pub via: Option<String>,
    /// Binding that a local client connects to, instead of a peer: its service, its `listen`
    /// address or one of its names. Only --address and --all apply besides, and --from and
    /// --cluster where the binding has `to`.
    #[arg(long, value_name = "NAME|HOST:PORT")]
    pub binding: Option<String>,
    /// Address of the peer or client, for `sources` of a listener and for policies that match it.
    #[arg(long, value_name = "IP")]
    pub address: Option<IpAddr>,
    /// All endpoints; without it the 50 most probable.
    #[arg(long)]
    #[serde(deserialize_with = "is_present", skip_serializing_if = "std::ops::Not::not")]
    pub all: bool,
}

impl Question {
    pub(super) fn origin(&self) -> Result<Origin, String> {
        match self.origin.as_deref() {
            None => Ok(Origin::Workload),
            Some("waypoint") => Ok(Origin::Waypoint),
            Some("gateway") => Ok(Origin::Gateway),
            Some(other) => {
                Err(format!("unknown origin {other:?}; write `waypoint` or `gateway`, or omit it"))
            }
        }
    }

    /// Returns the headers that gateways of other networks send; none for a tunnel that has passed
    /// no gateway.
    pub(super) fn forwarded(&self) -> Result<Option<Forwarded>, String> {
        if self.source.is_none() && self.via.is_none() {
            return Ok(None);
        }
        let via = self.via.as_ref().map(|via| {
            let hashes = via.split(',').map(|gateway| match gateway {
                "own" => Ok(OWN_HASH.to_string()),
                "other" => Ok(OTHER_HASH.to_string()),
                _ => Err(format!(
                    "unknown gateway {gateway:?} in --via; write a list of `own` and `other`, such \
                     as `--via other,own`"
                )),
            });
            hashes.collect::<Result<Vec<_>, _>>()
        });
        let source = self.source.as_ref().map(|source| source.as_bytes().into());
        Ok(Some(Forwarded {
            via: via.transpose()?.map(|via| via.join(",").into_bytes()),
            source,
            ..Forwarded::default()
        }))
    }

    pub(super) fn address(&self) -> SocketAddr {
        let ip = self.address.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        SocketAddr::new(ip, 0)
    }

    pub(super) fn limit(&self) -> usize {
        if self.all { usize::MAX } else { ROWS_SHOWN_MAX }
    }
}

fn join<S: Serializer>(list: &[String], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&list.join(","))
}

fn split<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let text = String::deserialize(deserializer)?;
    Ok(text.split(',').map(Into::into).collect())
}

/// Returns true for any value: the parameter is a flag.
fn is_present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    IgnoredAny::deserialize(deserializer).map(|_| true)
}
