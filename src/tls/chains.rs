//! Cache of verified certificate chains, which makes reconnects of a peer cheap.

use std::collections::HashMap;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::digest::{Context, SHA256};
use parking_lot::Mutex;
use rustls::pki_types::{CertificateDer, UnixTime};

use super::issuers::Issuer;

/// Lifetime of a cache entry; the chain is then verified again.
const LIFETIME: Duration = Duration::from_secs(5 * 60);
/// Capacity of each generation: 2 × 512 × 64 bytes plus the overhead of the maps is
/// about 140 KiB.
const GENERATION_CAPACITY: usize = 512;

/// Cache of the chains that one verifier has verified.
///
/// A hit is safe, because every input of the verdict is fixed or checked again:
/// - the chain: its key is the SHA-256 of all certificates, with their lengths and order;
/// - the roots, trust domains, revocation lists and algorithms: they belong to the verifier, and
///   a change creates a new verifier with an empty cache;
/// - the time: an entry is valid for five minutes from its verification, and never before it. It
///   ends earlier if a certificate on the path expires or another revocation list becomes stale.
///
/// Every handshake still proves possession of the leaf's key, after the lookup and independent
/// of it. A client with a valid chain can fill the cache with variants of it. Other chains are
/// then evicted early and verified again.
#[derive(Debug, Default)]
pub(super) struct ChainCache(Mutex<Generations>);

/// Two generations of entries: a full young generation replaces the old one.
#[derive(Debug, Default)]
struct Generations {
    young: HashMap<ChainFingerprint, Verdict>,
    old: HashMap<ChainFingerprint, Verdict>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ChainFingerprint([u8; 32]);

#[derive(Clone, Debug)]
pub(super) struct Verdict {
    pub(super) at: UnixTime,
    /// Time from which the verdict no longer applies.
    pub(super) until: UnixTime,
    pub(super) path: VerifiedPath,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct VerifiedPath {
    /// Last start of the validity of a certificate on the path.
    pub(super) not_before: UnixTime,
    /// First expiry of a certificate on the path.
    pub(super) not_after: UnixTime,
    pub(super) issuer: Arc<Issuer>,
}

impl ChainFingerprint {
    pub(super) fn new(leaf: &CertificateDer<'_>, intermediates: &[CertificateDer<'_>]) -> Self {
        let mut digest = Context::new(&SHA256);
        for certificate in [leaf].into_iter().chain(intermediates) {
            digest.update(&(certificate.len() as u64).to_be_bytes());
            digest.update(certificate);
        }
        let mut key = [0; 32];
        key.copy_from_slice(digest.finish().as_ref());
        Self(key)
    }
}

impl Verdict {
    fn is_valid(&self, now: UnixTime) -> bool {
        let age = now.as_secs().checked_sub(self.at.as_secs());
        let is_young = age.is_some_and(|age| age < LIFETIME.as_secs());
        is_young && now < self.until && now <= self.path.not_after
    }
}

impl ChainCache {
    /// Returns the path of a chain that was verified recently and is still valid.
    pub(super) fn get(&self, key: &ChainFingerprint, now: UnixTime) -> Option<VerifiedPath> {
        let halves = self.0.lock();
        let verified = halves.young.get(key).or_else(|| halves.old.get(key))?;
        verified.is_valid(now).then(|| verified.path.clone())
    }

    /// Records that the chain was verified.
    pub(super) fn add(&self, key: ChainFingerprint, verified: Verdict) {
        let mut halves = self.0.lock();
        if halves.young.len() >= GENERATION_CAPACITY {
            halves.old = mem::take(&mut halves.young);
        }
        halves.young.insert(key, verified);
    }
}

#[cfg(test)]
mod tests {
    use crate::wire::SpkiHash;

    use super::*;

    fn key(texts: &[&str]) -> ChainFingerprint {
        let certificates: Vec<_> =
            texts.iter().map(|text| CertificateDer::from(text.as_bytes())).collect();
        ChainFingerprint::new(&certificates[0], &certificates[1..])
    }

    fn time(seconds: u64) -> UnixTime {
        UnixTime::since_unix_epoch(Duration::from_secs(seconds))
    }

    fn verified(at: u64, until: u64, not_after: u64) -> Verdict {
        Verdict {
            at: time(at),
            until: time(until),
            path: VerifiedPath {
                not_before: time(0),
                not_after: time(not_after),
                issuer: Arc::new(Issuer {
                    spki: SpkiHash::new([0; 32]),
                    subject: "CN=west".into(),
                }),
            },
        }
    }

    #[test]
    fn a_chain_is_its_certificates_their_order_and_where_each_ends() {
        let same = key(&["leaf", "issuer"]);
        assert_eq!(same, key(&["leaf", "issuer"]));
        for other in [
            &["leaf"][..],
            &["leaf", "Issuer"],
            &["issuer", "leaf"],
            &["leafi", "ssuer"],
            &["leaf", "issuer", ""],
        ] {
            assert_ne!(same, key(other), "{other:?}");
        }
    }

    #[test]
    fn a_chain_holds_for_five_minutes_and_never_past_its_end_nor_before_its_time() {
        let chains = ChainCache::default();
        let (long, short, stale) = (key(&["long"]), key(&["short"]), key(&["stale"]));
        assert!(chains.get(&long, time(1000)).is_none());
        chains.add(long, verified(1000, 9000, 9000));
        chains.add(short, verified(1000, 9000, 1010));
        chains.add(stale, verified(1000, 1010, 9000));
        for (now, want) in [
            (999, [false, false, false]),
            (1000, [true, true, true]),
            (1009, [true, true, true]),
            (1010, [true, true, false]),
            (1011, [true, false, false]),
            (1299, [true, false, false]),
            (1300, [false, false, false]),
        ] {
            let now = time(now);
            let got = [long, short, stale].map(|key| chains.get(&key, now).is_some());
            assert_eq!(got, want, "at {now:?}");
        }
        chains.add(long, verified(1300, 9000, 9000));
        let end = chains.get(&long, time(1300));
        assert_eq!(end.map(|path| path.not_after), Some(time(9000)), "verified again");
    }

    #[test]
    fn more_chains_than_it_holds_push_the_oldest_out() {
        let chains = ChainCache::default();
        let key = |index: usize| key(&[&index.to_string()]);
        for index in 0..10 * GENERATION_CAPACITY {
            chains.add(key(index), verified(1000, 9000, 9000));
            let halves = chains.0.lock();
            assert!(
                halves.young.len() <= GENERATION_CAPACITY
                    && halves.old.len() <= GENERATION_CAPACITY
            );
        }
        let held = |index: &usize| chains.get(&key(*index), time(1000)).is_some();
        let count = (0..10 * GENERATION_CAPACITY).filter(held).count();
        assert!((GENERATION_CAPACITY + 1..=2 * GENERATION_CAPACITY).contains(&count), "{count}");
        assert!(held(&(10 * GENERATION_CAPACITY - 1)) && !held(&0));
    }
}
