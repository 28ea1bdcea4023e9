//! Delta ADS client as a state machine without I/O (rules: docs/wire-contract.md 3.1).
//!
//! The caller owns the stream. It reports [`connected`](Client::connected),
//! [`received`](Client::received) and [`disconnected`](Client::disconnected), and sends the
//! requests that these return in their order. Accepted resources go to a [`ResourceStore`]. Held
//! resources outlive the stream. Only removals by the server take them away and, for an
//! on-demand type, a change of the [wanted](Client::set_wanted) names.

mod backoff;
mod known;
mod messages;
mod rejected;
#[cfg(test)]
mod tests;
mod usage;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use self::backoff::Backoff;
use self::known::TypeState;
use self::usage::{Limits, Usage};

pub use self::backoff::StreamEnd;
pub(super) use self::usage::ENTRIES_MAX;

pub use self::messages::{
    Mode, Removals, Request, Resource, ResourceStore, Response, SHARED_PLACEHOLDER, Subscription,
};

/// Limit of names in one change of a subscription. Servers accept messages of 4 MiB, and a name
/// has at most 2 KiB.
const NAMES_PER_CHANGE_MAX: usize = 1_000;

/// State of the client: the subscriptions and the held resources of each type.
///
/// It holds at most 1,000,000 resources and wanted names, with 512 MiB of names, versions and
/// bodies. Resources beyond that are rejected. Nonces are not kept: each response is answered
/// immediately or never.
#[derive(Clone, Debug)]
pub struct Client {
    types: Vec<TypeState>,
    usage: Usage,
    connected: bool,
    backoff: Backoff,
}

impl Client {
    /// Creates a disconnected client without resources. Of two subscriptions to one type, the
    /// first counts.
    pub fn new(subscriptions: Vec<Subscription>) -> Self {
        Self::with_limits(subscriptions, Limits::default())
    }

    fn with_limits(subscriptions: Vec<Subscription>, limits: Limits) -> Self {
        let mut known: Vec<TypeState> = Vec::with_capacity(subscriptions.len());
        for new in subscriptions {
            let same = |known: &TypeState| known.subscription.type_url == new.type_url;
            if !known.iter().any(same) {
                known.push(TypeState::new(new));
            }
        }
        Self {
            types: known,
            usage: Usage::new(limits),
            connected: false,
            backoff: Backoff::default(),
        }
    }

    /// Starts a stream. Returns its first requests, one for each type, with the node and the
    /// version of every held resource.
    ///
    /// A server would refuse a request beyond 4 MiB. Above 3 MiB of names and versions of a
    /// type, the request contains none. The first response then lists all resources, as Istio's
    /// does, and held resources that it does not name are removed. Until then all of them stay.
    pub fn connected(&mut self) -> Vec<Request> {
        self.connected = true;
        let most = self.usage.limits.initial_versions_bytes;
        let known = self.types.iter_mut();
        known.map(|known| known.first_request(most)).collect()
    }

    /// Applies a response. Returns its one answer: an ACK, or a NACK that names each rejected
    /// resource while the others apply.
    ///
    /// Removals are applied before new versions. A resource is rejected if:
    /// - the [`ResourceStore`] rejects it,
    /// - the response has contradictory entries for it,
    /// - it has no usable name, no body or a body of another type, or
    /// - it exceeds the limits.
    ///
    /// A response of a type without subscription is NACKed as a whole. A response without a
    /// nonce applies and has no answer. A response while disconnected neither applies nor has
    /// an answer. Unwanted resources of an on-demand type are not held: they were sent before
    /// the server processed the unsubscription.
    pub fn received(
        &mut self,
        response: Response,
        resources: &mut impl ResourceStore,
    ) -> Vec<Request> {
        if !self.connected {
            return Vec::new();
        }
        let (type_url, error) = match find(&mut self.types, &response.type_url) {
            Some(known) => {
                let error = known.apply(&response, &mut self.usage, resources);
                (Cow::Borrowed(known.subscription.type_url), error)
            }
            None => {
                let error = "no subscription to this type".to_owned();
                (Cow::Owned(response.type_url), Some(error))
            }
        };
        if response.nonce.is_empty() {
            return Vec::new();
        }
        vec![Request { type_url, nonce: response.nonce, error, ..Request::default() }]
    }

    /// Replaces the wanted names of an on-demand type. Returns the changes of the subscription.
    /// While disconnected it returns none, and the first request of the next stream contains
    /// them.
    ///
    /// Held resources that are no longer wanted are removed from the `Resources`, because the
    /// server would not announce their removal. Unusable names are skipped, and so are names
    /// beyond 896 KiB or beyond the limits.
    pub fn set_wanted(
        &mut self,
        type_url: &str,
        names: &BTreeSet<String>,
        resources: &mut impl ResourceStore,
    ) -> Vec<Request> {
        let Some(known) = find(&mut self.types, type_url) else {
            return Vec::new();
        };
        let (new, gone) = known.set_wanted(names, &mut self.usage, resources);
        if !self.connected {
            return Vec::new();
        }
        // A change never answers a response, because a server treats names in an answer as an
        // error (docs/wire-contract.md 3.1).
        let change = || Request {
            type_url: Cow::Borrowed(known.subscription.type_url),
            ..Request::default()
        };
        let subscribe = new
            .chunks(NAMES_PER_CHANGE_MAX)
            .map(|names| Request { subscribe: names.to_vec(), ..change() });
        let unsubscribe = gone
            .chunks(NAMES_PER_CHANGE_MAX)
            .map(|names| Request { unsubscribe: names.to_vec(), ..change() });
        subscribe.chain(unsubscribe).collect()
    }

    /// Ends the stream, or reports that it could not be opened. Held resources stay. Returns the
    /// delay before the next attempt: 10 ms at first, doubled after each failure up to 15 s, and 10
    /// ms again after an end that docs/wire-contract.md 3.1 calls harmless. The caller adds jitter.
    pub fn disconnected(&mut self, end: StreamEnd) -> Duration {
        self.connected = false;
        self.backoff.next_delay(end)
    }

    /// Has the next stream request all resources again, although they are held. No type is
    /// [synced](Self::is_synced) before.
    pub fn request_all(&mut self) {
        self.types.iter_mut().for_each(TypeState::request_all);
    }

    /// Makes room for resources of a type, which [`Self::restore`] gets next.
    pub fn reserve(&mut self, type_url: &str, resources: usize) {
        if let Some(known) = find(&mut self.types, type_url) {
            known.reserve(resources);
        }
    }

    /// Restores a resource that an earlier run accepted, with its version and the size of its
    /// body in bytes. Call it for each resource from disk before the first stream.
    ///
    /// Returns whether the resource is held. One that is not held must not be in the
    /// `Resources` either, except as the placeholder [`SHARED_PLACEHOLDER`]. The next
    /// [`set_wanted`](Self::set_wanted) drops the unwanted resources of an on-demand type.
    pub fn restore(
        &mut self,
        type_url: &str,
        name: impl Into<Arc<str>>,
        version: impl Into<Arc<str>>,
        body: usize,
    ) -> bool {
        let (name, version) = (name.into(), version.into());
        find(&mut self.types, type_url)
            .is_some_and(|known| known.restore(&name, &version, body, &mut self.usage))
    }

    /// Returns whether each wildcard type had a usable response on any stream. A response is
    /// unusable if it has rejected resources and nothing of its type is held, placeholders
    /// included.
    pub fn is_synced(&self) -> bool {
        self.pending().next().is_none()
    }

    /// Returns the wildcard types without a usable response so far.
    pub fn pending(&self) -> impl Iterator<Item = &'static str> {
        let known = self.types.iter();
        known
            .filter(|known| known.subscription.mode == Mode::Wildcard && !known.had_usable_response)
            .map(|known| known.subscription.type_url)
    }

    /// Returns the wildcard types without any response on this stream.
    pub fn without_response(&self) -> impl Iterator<Item = &'static str> {
        let known = self.types.iter();
        let is_awaited = |known: &&TypeState| {
            known.subscription.mode == Mode::Wildcard && known.awaits_first_response
        };
        known.filter(is_awaited).map(|known| known.subscription.type_url)
    }

    /// Returns type, name, reason and version of the rejected resources. An entry lasts until a
    /// valid version, a removal, or the first response of the type on another stream.
    ///
    /// At most 1,000 of each type are listed, and the others are only
    /// [counted](Self::unlisted_rejections). The name is empty if it is unusable.
    pub fn rejected(&self) -> impl Iterator<Item = (&'static str, &str, &str, &str)> + Clone {
        self.types.iter().flat_map(|known| {
            let type_url = known.subscription.type_url;
            let rejected = known.rejected.iter();
            rejected.map(move |(name, reason, version)| (type_url, name, reason, version))
        })
    }

    /// Returns the largest number of rejected resources in one response of this stream that
    /// [`rejected`](Self::rejected) does not list.
    pub fn unlisted_rejections(&self, type_url: &str) -> usize {
        let known = self.known(type_url);
        known.map_or(0, |known| known.rejected.unlisted())
    }

    /// Returns the types in the order of their first requests.
    pub fn types(&self) -> impl Iterator<Item = &'static str> {
        self.types.iter().map(|known| known.subscription.type_url)
    }

    /// Returns the number of wanted names of a type without an answer: they were not held when
    /// they were added, and no response has mentioned them since.
    pub fn unanswered(&self, type_url: &str) -> usize {
        self.known(type_url).map_or(0, |known| known.unanswered.len())
    }

    pub fn held(&self, type_url: &str) -> usize {
        self.known(type_url).map_or(0, TypeState::len)
    }

    fn known(&self, type_url: &str) -> Option<&TypeState> {
        let mut known = self.types.iter();
        known.find(|known| known.subscription.type_url == type_url)
    }
}

fn find<'a>(known: &'a mut [TypeState], type_url: &str) -> Option<&'a mut TypeState> {
    let mut known = known.iter_mut();
    known.find(|known| known.subscription.type_url == type_url)
}
