//! Two clusters with real Envoys: client → Envoy → the gateway → Envoy → application.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use tokio::task::JoinSet;

use crate::process::{self, Envoy};
use crate::support::{CLIENT, ECHO, ENDPOINT, GATEWAY, Gateway, Net, Settings, identities, until};
use crate::traffic;

/// How the client Envoy ends a tunnel, once its inner connection has no more streams.
///
/// Envoy 1.40 closes such an inner connection with close_notify and at once, and its user-space
/// sockets show that to their other end as a reset (`enable_send_rst_on_user_space_socket`). So
/// the outer stream carries the close_notify, and then RST_STREAM INTERNAL_ERROR in place of
/// END_STREAM. Nothing is lost by it, because the streams of the inner connection had ended before;
/// but the gateway cannot know that, and counts the tunnel as `downstream_reset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ends {
    /// As it comes: by RST_STREAM.
    AsEnvoyDoes,
    /// As older versions do: by END_STREAM.
    Cleanly,
}

/// Everything that stands between a client and the application, running.
pub struct Mesh {
    pub gateway: Gateway,
    pub client: Envoy,
    pub endpoint: Envoy,
    version: String,
    net: Net,
    /// Ends the application when it is dropped.
    _application: JoinSet<()>,
}

impl Mesh {
    /// Starts all of it; none where Envoy is missing.
    pub async fn start(test: &str, ends: Ends) -> Option<Self> {
        let program = process::program(test)?;
        let net = Net::new();
        let mut application = JoinSet::new();
        application.spawn(traffic::application(net.listen(31, 9000).await));
        let settings = Settings::new(net, identities()).endpoints(&[(11, 1, "HBONE")]);
        let to_application = [("APPLICATION", net.ip(31).to_string())];
        let to_gateway = [
            ("AUTHORITY", ECHO.to_owned()),
            ("GATEWAY", net.ip(1).to_string()),
            ("GATEWAY_ID", GATEWAY.to_owned()),
            ("ENDPOINT_ID", ENDPOINT.to_owned()),
            ("RESETS", (ends == Ends::AsEnvoyDoes).to_string()),
        ];
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

    /// Where the client Envoy takes plain TCP.
    pub fn address(&self) -> SocketAddr {
        self.net.address(21, 19001)
    }

    /// The gateway's own count: waits until so many tunnels have ended, and says by which reasons.
    pub async fn ended(&self, tunnels: u64) -> BTreeMap<String, u64> {
        let counts = async || self.counts().await;
        until("ended tunnels", counts, |counts| {
            counts.values().sum::<u64>() >= tunnels
        })
        .await
    }

    async fn counts(&self) -> BTreeMap<String, u64> {
        let (_, text) = self.gateway.http(15020, "GET", "/metrics").await;
        let count = |line: &str| {
            let rest = line.strip_prefix("strait_tunnels_total{reason=\"")?;
            let (reason, value) = rest.split_once("\"} ")?;
            Some((reason.to_owned(), value.parse().expect("a number")))
        };
        text.lines()
            .filter_map(count)
            .filter(|&(_, count)| count > 0)
            .collect()
    }

    /// Prints a result, with Envoy's version before it.
    pub fn say(&self, result: &str) {
        process::say(&format!("envoy {}: {result}", self.version));
    }
}
