//! Chains that were verified lately: a peer that connects again costs less.

use std::collections::HashMap;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aws_lc_rs::digest::{Context, SHA256};
use rustls::pki_types::{CertificateDer, UnixTime};

use super::issuers::Issuer;

/// How long a chain is believed without being verified again.
const BELIEVED: Duration = Duration::from_secs(5 * 60);
/// Chains in each half: 2 × 512 × 64 bytes, with the maps' own room, are about 140 KiB.
const HALF: usize = 512;

/// The chains that one verifier has verified.
///
/// It is safe to believe them, because all that a verdict comes from is fixed or looked at again:
/// - the chain: its key is the SHA-256 of every certificate's bytes, with their lengths and order;
/// - the roots, the trust domains, the revocation lists and the algorithms: they are the
///   verifier's, and a change of them makes a new verifier, which has believed nobody yet;
/// - the time: a chain is believed for five minutes, and never past the first end of validity of
///   its certificates, nor before the time at which it was verified, nor once another revocation
///   list is stale.
///
/// That the peer has the leaf's key is proved in every handshake, whatever is in here, and after a
/// chain has come in. Whoever knows a good chain can fill the places with variants of it: others'
/// are then forgotten early, and verified again.
#[derive(Debug, Default)]
pub(super) struct Chains(Mutex<Halves>);

/// When the younger half is full, the older one is forgotten.
#[derive(Debug, Default)]
struct Halves {
    young: HashMap<Key, Verified>,
    old: HashMap<Key, Verified>,
}

/// A chain by its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key([u8; 32]);

/// A verdict that a chain is good.
#[derive(Clone, Debug)]
pub(super) struct Verified {
    /// The time that it is about.
    pub(super) at: UnixTime,
    /// The time from which it counts no more.
    pub(super) until: UnixTime,
    /// Facts about the verified way.
    pub(super) path: Path,
}

/// A verified way from a leaf to a root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Path {
    /// The end of the first of its certificates.
    pub(super) not_after: UnixTime,
    /// The issuer of the leaf.
    pub(super) issuer: Arc<Issuer>,
}

impl Key {
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

impl Verified {
    fn holds(&self, now: UnixTime) -> bool {
        let age = now.as_secs().checked_sub(self.at.as_secs());
        let is_young = age.is_some_and(|age| age < BELIEVED.as_secs());
        is_young && now < self.until && now <= self.path.not_after
    }
}

impl Chains {
    /// Returns the way of a chain that was verified lately and still holds.
    pub(super) fn hold(&self, key: &Key, now: UnixTime) -> Option<Path> {
        let halves = self.lock();
        let verified = halves.young.get(key).or_else(|| halves.old.get(key))?;
        verified.holds(now).then(|| verified.path.clone())
    }

    /// Notes that the chain was verified.
    pub(super) fn add(&self, key: Key, verified: Verified) {
        let mut halves = self.lock();
        if halves.young.len() >= HALF {
            halves.old = mem::take(&mut halves.young);
        }
        halves.young.insert(key, verified);
    }

    /// Each critical section is whole in itself, so data behind a poisoned lock is, too.
    fn lock(&self) -> MutexGuard<'_, Halves> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use crate::wire::SpkiHash;

    use super::*;

    fn key(texts: &[&str]) -> Key {
        let certificates: Vec<_> = texts
            .iter()
            .map(|text| CertificateDer::from(text.as_bytes()))
            .collect();
        Key::new(&certificates[0], &certificates[1..])
    }

    fn time(seconds: u64) -> UnixTime {
        UnixTime::since_unix_epoch(Duration::from_secs(seconds))
    }

    fn verified(at: u64, until: u64, not_after: u64) -> Verified {
        Verified {
            at: time(at),
            until: time(until),
            path: Path {
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
        let chains = Chains::default();
        let (long, short, stale) = (key(&["long"]), key(&["short"]), key(&["stale"]));
        assert!(chains.hold(&long, time(1000)).is_none());
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
            let got = [long, short, stale].map(|key| chains.hold(&key, now).is_some());
            assert_eq!(got, want, "at {now:?}");
        }
        chains.add(long, verified(1300, 9000, 9000));
        let end = chains.hold(&long, time(1300));
        assert_eq!(
            end.map(|path| path.not_after),
            Some(time(9000)),
            "verified again"
        );
    }

    #[test]
    fn more_chains_than_it_holds_push_the_oldest_out() {
        let chains = Chains::default();
        let key = |index: usize| key(&[&index.to_string()]);
        for index in 0..10 * HALF {
            chains.add(key(index), verified(1000, 9000, 9000));
            let halves = chains.lock();
            assert!(halves.young.len() <= HALF && halves.old.len() <= HALF);
        }
        let held = |index: &usize| chains.hold(&key(*index), time(1000)).is_some();
        let count = (0..10 * HALF).filter(held).count();
        assert!((HALF + 1..=2 * HALF).contains(&count), "{count}");
        assert!(held(&(10 * HALF - 1)) && !held(&0));
    }
}
