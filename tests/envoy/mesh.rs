//! Two clusters with real Envoys: client → Envoy → the gateway → Envoy → application.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;

use tokio::task::JoinSet;

use crate::process::{self, Envoy};
use crate::support::{CLIENT, ECHO, ENDPOINT, GATEWAY, Gateway, Net, Settings, identities, until};
use crate::traffic;

/// Limit of tunnels on a connection of Envoy, which is its default.
pub const STREAMS: u32 = 1024;

/// Way in which the client Envoy ends a tunnel after its inner connection has carried its one
/// stream.
///
/// Envoy then closes that connection at once by close_notify. Since 1.40 its user-space sockets
/// pass this to their other end as a reset (`enable_send_rst_on_user_space_socket`). The outer
/// stream therefore carries the close_notify and then RST_STREAM INTERNAL_ERROR, where older
/// versions send END_STREAM. Even with END_STREAM a few tunnels end by the same reset. Envoy
/// answers in this way to the endpoint's own close_notify if that arrives in a frame before
/// END_STREAM, because the inner connection has gone. Neither case loses bytes: the gateway sees a
/// close_notify and counts `completed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ends {
    /// By RST_STREAM, which is Envoy's default.
    ByReset,
    /// By END_STREAM.
    Cleanly,
}

/// Running processes between a client and the application, and the application.
pub struct Mesh {
    pub gateway: Gateway,
    pub client: Envoy,
    pub endpoint: Envoy,
    version: String,
    pub net: Net,
    /// Ends the application on drop.
    _application: JoinSet<()>,
}

impl Mesh {
    /// Starts everything; none if Envoy is missing.
    pub async fn start(test: &str, ends: Ends) -> Option<Self> {
        Self::start_with(test, ends, "", STREAMS).await
    }

    /// The same with more lines in the gateway's configuration, and a limit of the tunnels on a
    /// connection of Envoy.
    pub async fn start_with(test: &str, ends: Ends, more: &str, streams: u32) -> Option<Self> {
        let program = process::program(test)?;
        let net = Net::new();
        let application = traffic::application(net).await;
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "HBONE")]);
        settings.more = more.to_owned();
        let to_application = [("APPLICATION", net.ip(31).to_string())];
        let mut to_gateway = client_variables(net, ENDPOINT, ends);
        to_gateway[0].1 = streams.to_string();
        let (east, west) = (identities().leaf(ENDPOINT), identities().leaf(CLIENT));
        let endpoint = (include_str!("endpoint.yaml"), &to_application[..]);
        let client = (include_str!("client.yaml"), &to_gateway[..]);
        let (gateway, endpoint, client) = tokio::join!(
            Gateway::start(&settings),
            Envoy::start(&program, net, 11, &east, endpoint),
            Envoy::start(&program, net, 21, &west, client),
        );
        Some(Self {
            gateway,
            client,
            endpoint,
            version: process::version(&program).await,
            net,
            _application: application,
        })
    }

    /// Returns the address at which the client Envoy accepts plain TCP.
    pub fn address(&self) -> SocketAddr {
        self.net.address(21, 19001)
    }

    /// Waits until the gateway has counted this many ended tunnels, and returns its counts.
    pub async fn ended(&self, tunnels: u64) -> Ended {
        ended(&self.gateway, tunnels).await
    }

    /// Prints a result, prefixed with Envoy's version.
    pub fn print_uncaptured(&self, result: &str) {
        process::print_uncaptured(&format!("envoy {}: {result}", self.version));
    }
}

/// Returns the variables of `client.yaml` for the gateway of a net, and endpoints with this
/// identity.
pub fn client_variables(net: Net, endpoint: &str, ends: Ends) -> [(&'static str, String); 6] {
    [
        ("STREAMS", STREAMS.to_string()),
        ("AUTHORITY", ECHO.to_owned()),
        ("GATEWAY", net.ip(1).to_string()),
        ("GATEWAY_ID", GATEWAY.to_owned()),
        ("ENDPOINT_ID", endpoint.to_owned()),
        ("RESETS", (ends == Ends::ByReset).to_string()),
    ]
}

/// Waits until a gateway has counted this many ended tunnels, and returns its counts.
pub async fn ended(gateway: &Gateway, tunnels: u64) -> Ended {
    let counts = async || {
        let whole = |count: f64| count.to_string().parse().expect("a whole number");
        let ends = gateway.tunnels_by_reason().await.into_iter();
        Ended(ends.map(|(reason, count)| (reason, whole(count))).collect())
    };
    until("ended tunnels", counts, |ended| ended.tunnels() >= tunnels).await
}

/// Number of ended tunnels by reason, as counted by the gateway.
#[derive(Debug, Default)]
pub struct Ended(BTreeMap<String, u64>);

impl Ended {
    pub fn tunnels(&self) -> u64 {
        self.0.values().sum()
    }

    pub fn count(&self, reason: &str) -> u64 {
        self.0.get(reason).copied().unwrap_or(0)
    }

    /// Returns the others than those that ended for this reason.
    pub fn without(mut self, reason: &str) -> Self {
        self.0.remove(reason);
        self
    }

    /// Returns the number of tunnels that ended in another way than Envoy's normal ones.
    pub fn failed(&self) -> u64 {
        self.tunnels() - self.count("completed") - self.count("downstream_reset")
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tunnels, failed) = (self.tunnels(), self.failed());
        write!(f, "{tunnels} tunnels at the gateway, {failed} failed (")?;
        for (index, (reason, count)) in self.0.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            write!(f, "{comma}{count} {reason}")?;
        }
        f.write_str(")")
    }
}
