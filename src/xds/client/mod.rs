//! The delta ADS client as a machine without I/O: events in, requests and changes out.
//!
//! A caller owns the stream. It tells when one is [`connected`](Client::connected), what was
//! [`received`](Client::received) and how it was [`disconnected`](Client::disconnected), and sends
//! the requests that each of these returns, in their order. Accepted resources go to a
//! [`Resources`]. What is held outlives the stream: only the server's removals, and of an
//! on-demand type what is [wanted](Client::want) no more, take something away. The rules are
//! `contract.md` 3.1.

mod backoff;
mod known;
mod messages;
#[cfg(test)]
mod model;
mod rejected;
#[cfg(test)]
mod tests;
mod usage;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use self::backoff::Backoff;
use self::known::Known;
use self::usage::{Limits, Usage};

pub use self::backoff::End;
pub(super) use self::usage::ENTRIES_MAX;

pub use self::messages::{Mode, Request, Resource, Resources, Response, Subscription, UNPLACED};

/// Names in one change of a subscription: servers take messages of 4 MiB, and a name has 2 KiB at
/// most.
const NAMES_AT_ONCE: usize = 1_000;

/// The machine: what is held of each type, and what the server has to be told.
///
/// It holds at most 1,000,000 resources and wanted names, with 512 MiB of names, versions and
/// bodies; what is beyond is rejected. Nonces are not kept: an answer is made at once or never.
#[derive(Clone, Debug)]
pub struct Client {
    known: Vec<Known>,
    usage: Usage,
    connected: bool,
    backoff: Backoff,
}

impl Client {
    /// A machine that holds nothing and is not connected. Of two subscriptions to one type the
    /// first counts.
    pub fn new(subscriptions: Vec<Subscription>) -> Self {
        Self::with_limits(subscriptions, Limits::default())
    }

    fn with_limits(subscriptions: Vec<Subscription>, limits: Limits) -> Self {
        let mut known: Vec<Known> = Vec::with_capacity(subscriptions.len());
        for new in subscriptions {
            let same = |known: &Known| known.subscription.type_url == new.type_url;
            if !known.iter().any(same) {
                known.push(Known::new(new));
            }
        }
        Self {
            known,
            usage: Usage::new(limits),
            connected: false,
            backoff: Backoff::default(),
        }
    }

    /// A stream is there. Returns its first requests, one for each type: with the node, and with
    /// the version of everything that is held.
    ///
    /// A server would refuse a request beyond 4 MiB. Above 3 MiB of names and versions of a type
    /// none is sent: the first response then has all there is, as Istio sends it, and what it does
    /// not name is removed with it. Until then all stays.
    pub fn connected(&mut self) -> Vec<Request> {
        self.connected = true;
        let most = self.usage.limits.claims;
        let known = self.known.iter_mut();
        known.map(|known| known.first_request(most)).collect()
    }

    /// A response came on the stream. Returns the one answer to it: an ACK, or a NACK that names
    /// each rejected resource while the others apply.
    ///
    /// Removals are applied before new versions. A resource is rejected if the [`Resources`] says
    /// so, if the response says two things about it, if it has no usable name, no body or one of
    /// another type, or if it is beyond the limits. A type that we did not subscribe to is NACKed
    /// as a whole. There is no answer to a response without a nonce, which applies all the same,
    /// nor to one that comes while we are disconnected, which does not. What nobody wants of an
    /// on-demand type is not held: it was under way when it was forgotten.
    pub fn received(&mut self, response: Response, resources: &mut impl Resources) -> Vec<Request> {
        if !self.connected {
            return Vec::new();
        }
        let (type_url, error) = match find(&mut self.known, &response.type_url) {
            Some(known) => {
                let error = known.apply(&response, &mut self.usage, resources);
                (Cow::Borrowed(known.subscription.type_url), error)
            }
            None => {
                let error = "we did not subscribe to this type".to_owned();
                (Cow::Owned(response.type_url), Some(error))
            }
        };
        if response.nonce.is_empty() {
            return Vec::new();
        }
        vec![Request::answer(type_url, response.nonce, error)]
    }

    /// Wants of an on-demand type what has these names, and nothing else. Returns the changes of
    /// the subscription; while there is no stream they are in the first request of the next one.
    ///
    /// What is held and wanted no more is removed from the `Resources`, as nobody would tell us of
    /// its end. Names that cannot be used are passed over, and so are those beyond 896 KiB or the
    /// limits.
    pub fn want(
        &mut self,
        type_url: &str,
        names: &BTreeSet<String>,
        resources: &mut impl Resources,
    ) -> Vec<Request> {
        let Some(known) = find(&mut self.known, type_url) else {
            return Vec::new();
        };
        let (new, gone) = known.want(names, &mut self.usage, resources);
        if !self.connected {
            return Vec::new();
        }
        let type_url = known.subscription.type_url;
        let new = new.chunks(NAMES_AT_ONCE);
        let new = new.map(|names| Request::change(type_url, names.to_vec(), Vec::new()));
        let gone = gone.chunks(NAMES_AT_ONCE);
        let gone = gone.map(|names| Request::change(type_url, Vec::new(), names.to_vec()));
        new.chain(gone).collect()
    }

    /// The stream ended, or none came about. Returns how long to wait before the next try: 10 ms
    /// at first, twice as long after each failure up to 15 s, and 10 ms again after an end that
    /// contract 3.1 calls harmless. Jitter is the caller's. Everything that is held stays.
    pub fn disconnected(&mut self, end: End) -> Duration {
        self.connected = false;
        self.backoff.wait(end)
    }

    /// Holds what another run accepted, in which version and by a body of how many bytes: to be
    /// called before the first stream for each resource from the disk. Says whether it is held;
    /// what is not has no place in the `Resources` either, but for what stands in for it as
    /// [`UNPLACED`]. Of an on-demand type what the next [`want`](Self::want) does not want is
    /// dropped then.
    pub fn restore(
        &mut self,
        type_url: &str,
        name: impl Into<Arc<str>>,
        version: impl Into<Arc<str>>,
        body: usize,
    ) -> bool {
        let (name, version) = (name.into(), version.into());
        find(&mut self.known, type_url)
            .is_some_and(|known| known.restore(&name, &version, body, &mut self.usage))
    }

    /// Whether each wildcard type had a response, on any stream, that was of use: not one of which
    /// everything was rejected while nothing is held and nothing stands in for it.
    pub fn is_synced(&self) -> bool {
        self.pending().next().is_none()
    }

    /// The wildcard types that had no such response yet.
    pub fn pending(&self) -> impl Iterator<Item = &'static str> {
        let known = self.known.iter();
        known
            .filter(|known| known.subscription.mode == Mode::Wildcard && !known.synced)
            .map(|known| known.subscription.type_url)
    }

    /// Those of the [`pending`](Self::pending) types that this stream has not had a word about.
    pub fn untold(&self) -> impl Iterator<Item = &'static str> {
        let pending = self.pending();
        pending.filter(|type_url| self.known(type_url).is_some_and(|known| known.fresh))
    }

    /// What is rejected, as type, name, reason and version: until a good version or a removal
    /// comes, or another stream has told anew. At most 1,000 of each type; the others are only
    /// [counted](Self::unlisted). The name is empty where
    /// it cannot be used.
    pub fn rejected(&self) -> impl Iterator<Item = (&'static str, &str, &str, &str)> + Clone {
        self.known.iter().flat_map(|known| {
            let type_url = known.subscription.type_url;
            let rejected = known.rejected.iter();
            rejected.map(move |(name, reason, version)| (type_url, name, reason, version))
        })
    }

    /// How many more resources of a type were rejected by one message of this stream, at most, than
    /// [`rejected`](Self::rejected) lists.
    pub fn unlisted(&self, type_url: &str) -> usize {
        let known = self.known(type_url);
        known.map_or(0, |known| known.rejected.unlisted())
    }

    /// The types, in the order of their first requests.
    pub fn types(&self) -> impl Iterator<Item = &'static str> {
        self.known.iter().map(|known| known.subscription.type_url)
    }

    /// How many names are wanted of a type of which no stream has said yet what they stand for, or
    /// that it is nothing.
    pub fn unanswered(&self, type_url: &str) -> usize {
        self.known(type_url).map_or(0, |known| known.asked.len())
    }

    /// How many resources of a type are held.
    pub fn held(&self, type_url: &str) -> usize {
        self.known(type_url).map_or(0, Known::len)
    }

    fn known(&self, type_url: &str) -> Option<&Known> {
        let mut known = self.known.iter();
        known.find(|known| known.subscription.type_url == type_url)
    }
}

fn find<'a>(known: &'a mut [Known], type_url: &str) -> Option<&'a mut Known> {
    let mut known = known.iter_mut();
    known.find(|known| known.subscription.type_url == type_url)
}
