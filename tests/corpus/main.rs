//! Files and their expected results: configurations, mesh files, objects, pods, and questions about
//! tunnels (`findings`); the reference of the configuration; and the corpus of the fuzz targets.
//!
//! Nothing runs here: the peer of each test is a text. [`replay`] also tries a few thousand
//! mutations of the corpus in every run. `make fuzz` searches for more inputs, which are added to
//! the corpus with descriptive names.

#![expect(unreachable_pub, reason = "a test binary exports nothing, and plain `pub` reads better")]

#[cfg(test)]
mod explain;
#[cfg(test)]
mod findings;
#[cfg(test)]
mod objects;
#[cfg(test)]
mod reference;
#[cfg(test)]
#[path = "../fuzz/targets/mod.rs"]
mod targets;

#[cfg(test)]
mod replay {
    use std::cell::Cell;
    use std::collections::BTreeMap;
    use std::fs;
    use std::panic::{catch_unwind, set_hook, take_hook};
    use std::path::{Path, PathBuf};
    use std::sync::Once;

    use strait::datapath::http2::hpack::HpackError;
    use strait::tls::record::Content;

    use crate::targets;

    thread_local! {
        /// Panics of this thread. tokio catches panics of its tasks.
        static PANICS: Cell<u32> = const { Cell::new(0) };
    }

    fn count_panics() {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let usual = take_hook();
            set_hook(Box::new(move |panic| {
                PANICS.set(PANICS.get() + 1);
                usual(panic);
            }));
        });
    }

    /// The committed inputs of a target.
    fn corpus(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
        let top = Path::new(env!("CARGO_MANIFEST_DIR"));
        let folder = top.join("tests/fuzz/corpus").join(target);
        let entries = fs::read_dir(&folder).expect("a corpus");
        let mut paths: Vec<_> = entries.map(|entry| entry.expect("a file").path()).collect();
        paths.sort();
        assert!(!paths.is_empty(), "{} is empty", folder.display());
        let read = |path: PathBuf| (path.clone(), fs::read(path).expect("a file"));
        paths.into_iter().map(read).collect()
    }

    /// Runs every input of the corpus, and `mutations` of each.
    fn replay(target: &str, body: fn(&[u8]), mutations: u64) {
        count_panics();
        let corpus = corpus(target);
        for (path, input) in &corpus {
            run(body, input, path, 0);
            for seed in 1..=mutations {
                let mut random = fastrand::Rng::with_seed(seed);
                let other = &corpus[random.usize(..corpus.len())].1;
                run(body, &mutated(input, other, &mut random), path, seed);
            }
        }
    }

    fn run(body: fn(&[u8]), input: &[u8], path: &Path, seed: u64) {
        let ended = catch_unwind(|| body(input));
        let panics = PANICS.take();
        // Each panic has been printed before.
        assert!(
            panics == 0 && ended.is_ok(),
            "{} by seed {seed}: {}",
            path.display(),
            input.escape_ascii()
        );
    }

    /// Returns the input with a few changes of the kinds that find most: other bytes, pieces moved,
    /// doubled and removed, and pieces of another input.
    fn mutated(input: &[u8], other: &[u8], random: &mut fastrand::Rng) -> Vec<u8> {
        let mut bytes = input.to_vec();
        for _ in 0..random.usize(1..5) {
            let at = random.usize(..=bytes.len());
            let end = (at + random.usize(..16)).min(bytes.len());
            match random.u8(..6) {
                0 => bytes.insert(at, random.u8(..)),
                1 => drop(bytes.drain(at..end)),
                2 => bytes.extend_from_within(at..end),
                3 => {
                    let from = random.usize(..=other.len());
                    let piece = &other[from..(from + 16).min(other.len())];
                    drop(bytes.splice(at..at, piece.iter().copied()));
                }
                change => {
                    if let Some(byte) = bytes.get_mut(at) {
                        *byte = match change {
                            4 => *byte ^ 1 << random.u8(..8),
                            _ => random.u8(..),
                        };
                    }
                }
            }
        }
        bytes
    }

    #[test]
    fn authorities() {
        replay("authority", targets::authority, 3000);
    }

    #[test]
    fn identities() {
        replay("identity", targets::identity, 2000);
    }

    #[test]
    fn mesh_files() {
        replay("mesh_file", targets::mesh_file, 1000);
    }

    #[test]
    fn objects_of_kubernetes() {
        replay("objects", targets::objects, 300);
    }

    #[test]
    fn configurations() {
        replay("strait_yaml", targets::strait_yaml, 1000);
    }

    #[test]
    fn discovery_resources() {
        replay("wds", targets::wds, 1000);
    }

    #[test]
    fn clusters_and_endpoints() {
        replay("eds", targets::eds, 1000);
    }

    #[test]
    fn hellos() {
        replay("hello", targets::hello, 1000);
    }

    #[test]
    fn headers_of_load_balancers() {
        replay("proxy_header", targets::proxy_header, 2000);
    }

    #[test]
    fn records() {
        replay("record", |input| drop(targets::record(input)), 2000);
    }

    #[test]
    fn answers_of_an_authority() {
        replay("ca_answer", targets::ca_answer, 2000);
    }

    #[test]
    fn header_blocks() {
        replay("hpack", |input| _ = targets::hpack(input), 1000);
    }

    #[test]
    fn header_blocks_of_the_corpus_fail_in_every_way() {
        let ended: Vec<_> =
            corpus("hpack").into_iter().map(|(_, input)| targets::hpack(&input)).collect();
        let fields: usize = ended.iter().map(|(fields, _)| fields).sum();
        assert!(fields > 50, "{fields} fields");
        for error in [
            HpackError::Truncated,
            HpackError::Integer,
            HpackError::Huffman,
            HpackError::Index,
            HpackError::TableSize,
        ] {
            let fails = ended.iter().any(|(_, ended)| *ended == Some(error));
            assert!(fails, "no block of the corpus fails by {error:?}");
        }
    }

    #[test]
    fn records_of_the_corpus_have_every_content_and_every_alert() {
        let opened: Vec<_> =
            corpus("record").into_iter().map(|(_, input)| targets::record(&input)).collect();
        for content in [
            Content::ApplicationData,
            Content::KeyUpdate { requested: true },
            Content::KeyUpdate { requested: false },
            Content::CloseNotify,
            Content::Nothing,
        ] {
            let mut records = opened.iter().flat_map(|(records, _)| records);
            let occurs = records.any(|(of_record, _)| *of_record == content);
            assert!(occurs, "no record of the corpus is {content:?}");
        }
        let errors = opened.iter().filter_map(|(_, error)| error.as_ref());
        let alerts: Vec<_> = errors.map(|error| error.alert().map(u8::from)).collect();
        // unexpected_message, bad_record_mac, record_overflow, illegal_parameter, decode_error, and
        // none for an alert of the peer (RFC 8446 section 6.2).
        for alert in [Some(10), Some(20), Some(22), Some(47), Some(50), None] {
            assert!(alerts.contains(&alert), "no error of the corpus has {alert:?}");
        }
    }

    #[test]
    fn connections() {
        replay("http2", |input| drop(targets::http2(input)), 50);
    }

    #[test]
    fn connections_of_the_corpus_end_their_tunnels_in_every_way_that_a_peer_can_cause() {
        let reasons = [
            "completed",
            "bad_authority",
            "not_connect",
            "too_many_fields",
            "unknown_service",
            "not_exposed",
            "dial_denied",
            "dial_refused",
            "malformed",
            "downstream_cancelled",
            "downstream_reset",
            "downstream_lost",
            "upstream_reset",
            "drain_deadline",
            "revoked",
        ];
        let mut reached: BTreeMap<String, f64> = BTreeMap::new();
        for (_, input) in corpus("http2") {
            for line in targets::http2(&input).encode_plain().lines() {
                let (series, value) = line.rsplit_once(' ').expect("a value");
                let name = series.split_once(',').map_or(series, |(name, _)| name);
                let value = value.parse().unwrap_or(0.0);
                *reached.entry(name.to_owned()).or_default() += value;
            }
        }
        for reason in reasons {
            let ended = reached.get(&format!("strait_tunnels_total{{reason=\"{reason}\""));
            assert!(ended.is_some_and(|&ended| ended > 0.0), "no tunnel of the corpus is {reason}");
        }
    }
}
