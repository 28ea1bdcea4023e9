//! One test for each rule of the arithmetic.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::json;

use crate::chart::{self, Entry, escaped};
use crate::figures::{
    Interval, Limit, Round, Summary, Turn, ValidatedRound, Verdict, interval, median,
};
use crate::measurement::{Measurement, Quantile, Unit};
use crate::outcome::Outcome;
use crate::page::{replaced, section};
use crate::rows::{BESIDE_BEFORE, Kind, README_ROWS, ROWS, Row, Transport};

/// A round of one turn.
fn round(strait: &[f64], peer: &[f64]) -> Round {
    let turns = vec![Turn { strait: strait.to_vec(), peer: peer.to_vec() }];
    Round { turns, foreign: 0.0 }
}

fn close(one: f64, other: f64) -> bool {
    (one - other).abs() < 1e-9
}

#[test]
fn a_median_is_the_middle_or_between_two() {
    assert!(close(median(&[3.0, 1.0, 2.0]), 2.0));
    assert!(close(median(&[4.0, 1.0, 2.0, 3.0]), 2.5));
    assert!(close(median(&[7.0]), 7.0));
}

#[test]
fn an_interval_is_around_its_median_and_always_the_same() {
    let figures: Vec<f64> = (0..11).map(f64::from).collect();
    let Interval { median, low, high } = interval(&figures);
    assert!(close(median, 5.0));
    // By the binomial distribution, 95 % are between the third and the ninth of eleven.
    assert!((1.0..=3.0).contains(&low) && (7.0..=9.0).contains(&high));
    assert_eq!(interval(&figures), interval(&figures));
    let all_one = interval(&[0.5; 3]);
    assert!(close(all_one.low, 0.5) && close(all_one.high, 0.5));
}

#[test]
fn a_round_counts_if_its_control_pairs_agree_and_nobody_else_was_busy() {
    let control = 0.93..=1.07;
    let good = round(&[1.0, 1.05], &[2.0, 1.95]);
    assert!(close(good.ratio(), 2.05 / 3.95));
    let names = ["Strait", "Envoy"];
    assert!(good.clone().validate(names, &control).is_ok());
    let why = |round: Round| round.validate(names, &control).unwrap_err();
    assert_eq!(why(round(&[1.0, 1.2], &[2.0, 2.0])), "control pair of Strait: 1.20");
    assert_eq!(why(round(&[1.0, 1.0], &[2.0, 1.8])), "control pair of Envoy: 0.90");
    let busy = Round { foreign: 0.06, ..good.clone() };
    assert_eq!(why(busy), "foreign CPU: 6 %");
    // One turn in a slow phase of the machine has no effect.
    let turns = [&good, &round(&[1.0, 1.9], &[2.0, 2.0]), &good].map(|one| one.turns[0].clone());
    let three = Round { turns: turns.to_vec(), foreign: 0.0 };
    assert!(close(three.ratio(), good.ratio()) && three.validate(names, &control).is_ok());
    // Memory has one sample of each, and no pair.
    assert!(round(&[1.0], &[9.0]).validate(names, &control).is_ok());
}

#[test]
fn a_baseline_is_subtracted_before_the_ratio() {
    let added = round(&[0.3, 0.5], &[0.9, 1.1]).above(&[vec![0.1, 0.3]]);
    assert!(close(added.expect("more than the baseline").ratio(), 0.2 / 0.8));
    for (strait, peer) in [(0.2, 0.9), (0.9, 0.1)] {
        let nothing = round(&[strait], &[peer]).above(&[vec![0.2]]);
        assert_eq!(nothing.unwrap_err(), "nothing was added");
    }
}

#[test]
fn a_row_is_void_when_fewer_than_half_of_its_rounds_count() {
    let good = || Ok(round(&[1.0, 1.0], &[2.0, 2.0]));
    let void = || Err("control pair of Envoy: 0.50".to_owned());
    let verdict = |rounds: &[ValidatedRound]| Summary::of(rounds).verdict(Limit::Ratio(0.5));
    assert_eq!(verdict(&[good(), void()]), Verdict::Ok);
    assert_eq!(verdict(&[good(), void(), void()]), Verdict::Void);
    assert_eq!(verdict(&[void(), void()]), Verdict::Void);
    assert_eq!(verdict(&[]), Verdict::Void);
    let summary = Summary::of(&[good(), void(), void()]);
    assert_eq!((summary.valid, summary.rounds), (1, 3));
}

#[test]
fn the_median_decides_about_the_bar() {
    let ratios = [0.4, 0.6, 0.9];
    let rounds: Vec<ValidatedRound> = ratios.iter().map(|&x| Ok(round(&[x], &[1.0]))).collect();
    let summary = Summary::of(&rounds);
    assert_eq!(summary.verdict(Limit::Ratio(0.6)), Verdict::Ok);
    assert_eq!(summary.verdict(Limit::Ratio(0.59)), Verdict::Miss);
    let memory = Summary::of(&[Ok(round(&[2.5], &[18.8]))]);
    assert_eq!(memory.verdict(Limit::Absolute(2.6)), Verdict::Ok);
    assert_eq!(memory.verdict(Limit::Absolute(2.4)), Verdict::Miss);
    let costs = memory.costs.expect("a round");
    assert!(close(costs.strait, 2.5) && close(costs.peer, 18.8));
    let bar = Limit::Absolute(9.4).as_ratio(&costs).expect("a bar");
    assert!(close(bar, 0.5));
    assert_eq!(memory.verdict(Limit::None), Verdict::Ok);
    assert_eq!(Limit::None.as_ratio(&costs), None);
}

#[test]
fn a_report_counts_if_the_load_went_well_and_used_the_right_key_exchange() {
    let report = |key_exchange: &str, failures: u32| {
        json!({
            "work": "up", "seconds": 5.0, "operations": 7, "operations_per_second": 1.4,
            "sent_bytes": 2_500_000_000_u64, "received_bytes": 0,
            "failures": failures, "failures_by_kind": {"no tunnel": failures},
            "interrupted": false, "server_names": [], "key_exchange": key_exchange,
            "cipher_suite": "TLS13_AES_256_GCM_SHA384", "latency_us": {"p50": 500.0, "p99": 2500.0},
        })
    };
    let outcome = Outcome::read(&report("X25519", 0)).expect("a good one");
    for (what, expected) in [
        (Measurement::Cpu(Unit::GbSent), Some("0.280 s/GB")),
        (Measurement::Cpu(Unit::GbReceived), None),
        (Measurement::Cpu(Unit::Request), Some("100000.000 µs/request")),
        (Measurement::Latency(Quantile::P50), Some("0.500 ms")),
        (Measurement::Added(Quantile::P99), Some("2.500 ms")),
        (Measurement::TransferTime(Unit::GbSent), Some("0.002 s/MB")),
        (Measurement::Memory(&[]), None),
    ] {
        let cost = outcome.cost(what, Duration::from_millis(700));
        let shown = cost.map(|cost| format!("{cost:.3} {}", what.unit()));
        assert_eq!(shown.as_deref(), expected, "{what:?}");
    }
    assert!(close(outcome.rate(), 1.4));
    assert_eq!(outcome.cipher_suite(), Some("TLS13_AES_256_GCM_SHA384"));
    let why = |report| Outcome::read(&report).unwrap_err();
    assert!(why(report("X25519MLKEM768", 0)).contains("X25519MLKEM768"));
    assert!(why(report("X25519", 3)).contains("no tunnel"));
    assert!(why(json!(null)).contains("no report"));
    let mut bare = report("X25519", 0);
    bare["key_exchange"] = json!(null);
    assert!(why(bare.clone()).contains("None"));
    bare["server_names"] = json!(["echo.bench"]);
    assert!(Outcome::read(&bare).is_ok(), "no TLS of the gateway's");
}

#[test]
fn a_chart_has_a_bar_for_each_row_and_escapes_their_names() {
    assert_eq!(escaped("a<b & \"c\""), "a&lt;b &amp; &quot;c&quot;");
    let entry = |name: &str, median| Entry {
        name: name.to_owned(),
        ratio: Interval { median, low: 0.4, high: 9.0 },
        bar: (name != "read").then_some(0.62),
    };
    let svg = chart::svg("A & B", &[entry("up < down", 0.5), entry("rr", 0.7), entry("read", 0.8)]);
    assert!(svg.contains("<title>A &amp; B</title>") && svg.contains("up &lt; down"));
    assert_eq!(svg.matches("<rect").count(), 3);
    assert_eq!(svg.matches("\"limit\"").count(), 2);
    assert_eq!(svg.matches("class=\"over\"").count(), 1);
    assert!(svg.contains("0.50 (0.62)") && svg.contains("prefers-color-scheme: dark"));
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert_eq!(chart::digits(0.00631), "0.006");
}

#[test]
fn a_page_keeps_all_but_the_table() {
    let text = "one\n<!-- bench -->\nold\n<!-- /bench -->\ntwo\n";
    assert_eq!(section(text, "bench"), Ok("old"));
    let new = replaced(text, "bench", "| new |\n").expect("marks");
    assert_eq!(new, "one\n<!-- bench -->\n| new |\n<!-- /bench -->\ntwo\n");
    assert!(replaced("one\n<!-- bench -->\n", "bench", "new").is_err());
    for own in [include_str!("../../README.md"), include_str!("../../docs/performance.md")] {
        assert!(section(own, "bench").is_ok(), "a page has its marks");
    }
    let of_meshes = section(include_str!("../../docs/performance.md"), "bench-xds");
    assert!(of_meshes.is_ok(), "{of_meshes:?}");
}

#[test]
fn each_row_of_the_readme_has_a_limit() {
    let own = section(include_str!("../../README.md"), "bench").unwrap();
    for name in README_ROWS {
        let row = ROWS.iter().find(|row| row.name == name).unwrap();
        assert_eq!(row.subject, Kind::Strait, "{name}");
        assert!(row.peers.iter().any(|(_, bar)| *bar != Limit::None), "{name}");
        assert_eq!(own.matches(&format!("| {name} |")).count(), 1, "{name}");
    }
}

#[test]
fn every_row_has_an_endpoint_that_its_load_needs() {
    for row in &ROWS {
        let work = row.load.split(' ').next().expect("a work");
        let endpoint = match work {
            "up" => "sink",
            "down" | "stall" => "source",
            "churn" | "handshake" => "many",
            _ => "echo",
        };
        // Service `apart` is an echo too.
        let of_row = row.endpoint.replace("apart", "echo");
        assert_eq!(of_row, endpoint, "{}", row.name);
        assert!(!row.ztunnel.is_empty(), "{}", row.name);
        assert!(!row.peers.is_empty(), "{}", row.name);
        for &(peer, bar) in row.peers {
            assert_ne!(peer, row.subject, "{}", row.name);
            match (row.way, row.what, bar) {
                (Transport::Hbone, Measurement::Memory(_), bar) => {
                    let has_bar = matches!(bar, Limit::Absolute(_));
                    assert_eq!(has_bar, row.subject == Kind::Strait, "{}", row.name);
                }
                (Transport::Sni, _, Limit::Ratio(ratio)) => assert!(ratio <= 1.2),
                (_, _, Limit::Ratio(ratio)) if peer == Kind::Strait => assert!(ratio < 1.1),
                (_, _, Limit::Ratio(ratio)) => assert!(ratio < 1.0),
                (_, _, Limit::None) => {}
                (_, _, bar) => panic!("{bar:?} for {}", row.name),
            }
        }
        if let Measurement::Memory(held) = row.what {
            assert!(held.iter().all(|held| held.tunnels() >= 100), "{}", row.name);
        }
    }
}

#[test]
fn rows_of_one_load_follow_each_other() {
    for (index, row) in ROWS.iter().enumerate() {
        let same = |other: &Row| row.shares_load(other);
        let last = ROWS.iter().rposition(same).expect("the row itself");
        assert!(ROWS[index..=last].iter().all(same), "{}", row.name);
    }
    let paced = |row: &&Row| row.is_paced();
    let kinds: BTreeSet<_> = ROWS.iter().filter(paced).map(|row| row.load).collect();
    assert_eq!(kinds.len(), 2, "{kinds:?}");
}

#[test]
fn rows_with_a_baseline_of_their_own_do_not_compare_builds() {
    for row in &ROWS {
        let has_direct = row.peers.iter().any(|&(peer, _)| peer == Kind::Direct);
        assert_eq!(row.adds_latency(), has_direct, "{}", row.name);
        let is_plain = !has_direct && row.subject == Kind::Strait;
        assert_eq!(row.compares_builds(), is_plain, "{}", row.name);
        let floors = row.peers.iter().filter(|(peer, _)| peer.is_floor());
        assert!(floors.count() <= 1, "{}", row.name);
    }
}

#[test]
fn each_peer_has_rows_and_a_name_of_its_own() {
    let names: BTreeSet<&str> = Kind::ALL.into_iter().map(Kind::name).collect();
    assert_eq!(names.len(), Kind::ALL.len());
    for kind in Kind::ALL {
        let mut beside = ROWS.iter().flat_map(|row| row.peers).chain(&BESIDE_BEFORE);
        let has = beside.any(|&(peer, _)| peer == kind);
        let is_subject = ROWS.iter().any(|row| row.subject == kind);
        assert!(has || is_subject, "{kind:?}");
    }
}
