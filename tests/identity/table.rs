//! The table over the real listener.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

use rustls::ClientConfig;

use crate::cases::{ADMITTED, cases};
use crate::peer::{Received, connect};
use crate::pki::{Pki, Shown};
use crate::support::{CLIENT, Endpoint, GATEWAY, Gateway, Identities, Net, Settings, run, until};

/// Gateway, its endpoint, which detects admitted tunnels, and the expected counts of both.
pub struct Bench {
    pub gateway: Gateway,
    trap: Endpoint,
    usual: Arc<ClientConfig>,
    refused: BTreeMap<String, u64>,
    dialled: usize,
}

impl Bench {
    pub async fn start(trusted: &str) -> Self {
        let net = Net::new();
        let mut identities = Identities::new();
        identities.root += trusted;
        let settings = Settings::new(net, &identities).endpoints(&[(11, 1, "TCP")]);
        let gateway = Gateway::start(&settings).await;
        Self {
            trap: Endpoint::echo(net.listen(11, 9000).await),
            usual: identities.client(CLIENT, GATEWAY),
            refused: refused(&gateway).await,
            dialled: 0,
            gateway,
        }
    }

    /// Connects with a certificate. Returns the one reason whose count changed, by one, or the
    /// endpoint's.
    ///
    /// A later change is detected at the next certificate, where it is an error.
    pub async fn connect_with(&mut self, shown: &Shown) -> Result<String, String> {
        let received = connect(self.gateway.address, &self.usual, shown).await;
        // While the connection is open, because its tunnel is dialled only for as long.
        let movements = async || self.movements().await;
        let moved = until("a movement", movements, |moved| !moved.is_empty()).await;
        for what in &moved {
            match self.refused.get_mut(what) {
                Some(count) => *count += 1,
                None => self.dialled += 1,
            }
        }
        match (&received, moved.as_slice()) {
            (Received::Admitted(_), [what]) if what == ADMITTED => Ok(what.clone()),
            (Received::Alert(_), [reason]) if reason != ADMITTED => Ok(reason.clone()),
            _ => Err(format!("{received:?}, and {moved:?} moved")),
        }
    }

    /// Returns each reason as often as its count has changed since the last call, and likewise the
    /// endpoint.
    async fn movements(&self) -> Vec<String> {
        let mut moved = Vec::new();
        for (reason, count) in refused(&self.gateway).await {
            let new = count - self.refused[&reason];
            moved.extend((0..new).map(|_| reason.clone()));
        }
        let new = self.trap.accepted() - self.dialled;
        moved.extend((0..new).map(|_| ADMITTED.to_owned()));
        moved
    }
}

/// Returns the gateway's counts, by reason.
async fn refused(gateway: &Gateway) -> BTreeMap<String, u64> {
    let text = gateway.scrape().await;
    let count = |line: &str| {
        let line = line.strip_prefix("strait_handshakes_refused_total{reason=\"")?;
        let (reason, value) = line.split_once("\"} ")?;
        Some((reason.to_owned(), value.parse().expect("a number")))
    };
    text.lines().filter_map(count).collect()
}

#[test]
fn every_certificate_gets_its_one_reason_and_nothing_is_dialled_for_a_bad_one() {
    run(async {
        let pki = Pki::new();
        let mut bench = Bench::start(&pki.trusted()).await;
        let good = pki.west.client();
        let cases = cases(&pki);
        let mut wrong = String::new();
        // Twice: a verified chain is cached at the second pass, and nothing else may be.
        for case in cases.iter().chain(&cases) {
            assert_ne!(case.expected, "other", "{}: no reason at all", case.name);
            let seen = bench.connect_with(&case.shown).await;
            if seen.as_deref() != Ok(case.expected) {
                let _ = writeln!(wrong, "{}: {seen:?}, not {}", case.name, case.expected);
            }
            // A valid peer reaches the endpoint, so the gateway works and the endpoint detects
            // tunnels.
            let seen = bench.connect_with(&good).await;
            if seen.as_deref() != Ok(ADMITTED) {
                let _ = writeln!(wrong, "a good one after {}: {seen:?}", case.name);
            }
        }
        assert!(wrong.is_empty(), "\n{wrong}");
        let bad = cases.iter().filter(|case| case.expected != ADMITTED);
        let count = bad.count();
        assert!(count >= 60, "{count} bad certificates");
    });
}

/// rustls reads no handshake message beyond 64 KiB and sends no alert for one. Its content is
/// unknown, so the reason is `other`, and the peer sees the end of the connection.
#[test]
fn a_chain_of_more_than_64_kib_is_dropped_unread() {
    run(async {
        let pki = Pki::new();
        let mut bench = Bench::start(&pki.trusted()).await;
        let good = pki.west.client();
        let seen = bench.connect_with(&good.clone().and([&pki.west; 200])).await;
        let seen = seen.expect_err("no alert");
        assert!(seen.starts_with("Closed(") && seen.contains("[\"other\"]"), "{seen}");
        assert_eq!(bench.connect_with(&good).await.as_deref(), Ok(ADMITTED));
    });
}
