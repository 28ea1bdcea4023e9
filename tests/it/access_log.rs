//! The access log: limits on lines that peers can cause at will, and its modes.

use std::sync::Arc;

use strait::tools::hbone::Client;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;

use crate::support::{ECHO, Endpoint, Gateway, Net, Settings, identities, replace, run, until};

const OTHER: &str = "spiffe://west.local/ns/shop/sa/other";
const UNKNOWN: &str = "nothing.app.svc.cluster.local:80";
const REJECTED: usize = 3000;

/// A tunnel from its CONNECT to a clean end of both sides.
async fn completed(client: &Client) {
    let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
    tunnel.write_all(b"hello").await.expect("an open tunnel");
    tunnel.shutdown().await.expect("our end");
    let mut answer = String::new();
    tunnel.read_to_string(&mut answer).await.expect("an answer");
    assert_eq!(answer, "hello");
}

async fn rejected(client: &Client) {
    client.tunnel(UNKNOWN).await.expect_err("a rejection");
}

/// The sum of all `suppressed` fields of the log.
fn suppressed(log: &str) -> usize {
    let counts = log.split(" suppressed=").skip(1);
    let counts = counts.map(|rest| rest.split_whitespace().next().expect("a count"));
    counts.map(|count| count.parse::<usize>().expect("a number")).sum()
}

fn lines(log: &str, parts: &[&str]) -> usize {
    let has_all = |line: &&str| parts.iter().all(|part| line.contains(part));
    log.lines().filter(has_all).count()
}

#[test]
fn a_flood_of_rejected_connects_writes_few_lines_and_the_count_of_the_others() {
    run(async {
        let gateway = Gateway::start(&Settings::new(Net::new(), identities())).await;
        let client = Arc::new(gateway.client(identities()).await);
        let start = tokio::time::Instant::now();
        let mut flood = JoinSet::new();
        for _ in 0..20 {
            let client = Arc::clone(&client);
            flood.spawn(async move {
                for _ in 0..REJECTED / 20 {
                    rejected(&client).await;
                }
            });
        }
        flood.join_all().await;
        let seconds = usize::try_from(start.elapsed().as_secs()).expect("a few");
        rejected(&gateway.client_as(identities(), OTHER).await).await;
        gateway.logged(OTHER).await;

        // The last count is logged without another line of the same peer.
        let all = async || {
            let log = gateway.log();
            lines(&log, &["connection failed", "sa/checkout"]) + suppressed(&log)
        };
        until("each rejection", all, |&all| all == REJECTED).await;
        let log = gateway.log();
        let written = lines(&log, &["connection failed", "sa/checkout"]);
        // One limit for each second of the flood, including partial ones.
        assert!(written <= 10 * (seconds + 2), "{written} in {seconds} s");
        assert_eq!(lines(&log, &["lines suppressed", "sa/checkout"]), 1);
        let counted = gateway.metric("strait_access_log_suppressed_total").await;
        assert_eq!(counted, suppressed(&log) as f64);
        let ended = gateway.tunnels("unknown_service").await;
        assert_eq!(ended, (REJECTED + 1) as f64, "all are counted");
    });
}

#[test]
fn each_mode_of_the_access_log_applies_while_the_gateway_runs() {
    run(async {
        let net = Net::new();
        let settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        let gateway = Gateway::start(&settings).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        let file = gateway.file("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a configuration");
        let (mut complete, mut failed) = (0, 0);
        // The usual mode at last, whose lines come behind all others.
        for (mode, has_complete, has_failed) in [
            (None, true, true),
            (Some("off"), false, false),
            (Some("errors"), false, true),
            (Some("all"), true, true),
        ] {
            if let Some(mode) = mode {
                replace(&file, &format!("{text}log: {{access: {mode}}}\n"));
                let shown = format!("\"access\": \"{mode}\"");
                let dump = async || gateway.http(15000, "GET", "/config_dump").await.1;
                until(mode, dump, |dump| dump.contains(&shown)).await;
            }
            // Few enough for the limit of 10 rejections a second.
            for _ in 0..2 {
                completed(&client).await;
                rejected(&client).await;
            }
            gateway.wait_until_open(1, 0).await;
            complete += if has_complete { 2 } else { 0 };
            failed += if has_failed { 2 } else { 0 };
            let written = async || {
                let log = gateway.log();
                let complete = lines(&log, &["connection complete"]);
                (complete, lines(&log, &["connection failed"]))
            };
            until("lines", written, |&now| now == (complete, failed)).await;
        }
        assert_eq!(gateway.tunnels("completed").await, 8.0);
        assert_eq!(lines(&gateway.log(), &["takes effect with the next start"]), 0);
    });
}

#[test]
fn a_sampled_access_log_has_few_good_tunnels_and_every_kind_of_error() {
    run(async {
        let net = Net::new();
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        settings.more += "log: {access: sampled}\n";
        let gateway = Gateway::start(&settings).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        for _ in 0..300 {
            completed(&client).await;
        }
        rejected(&client).await;
        gateway.logged("reason=\"unknown_service\"").await;
        gateway.wait_until_open(1, 0).await;
        // 3 are expected; more than 30 have a probability below 10^-19.
        let written = lines(&gateway.log(), &["connection complete"]);
        assert!(written <= 30, "{written}");
        assert_eq!(gateway.tunnels("completed").await, 300.0);
    });
}
