//! Clients with deliberate faults, to verify that the model detects them.
//!
//! Each fault is a mistake that a real client could make. A wrapper around the correct client
//! changes its inputs, outputs or state.

use std::borrow::Cow;

use super::*;
use crate::xds::client::known::initial_version_bytes;
use crate::xds::client::usage::Limits;

/// Fault of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    Nothing,
    /// The first requests of a stream carry the last nonce of the stream before.
    KeepsTheNonce,
    /// A late answer is sent on the next stream.
    AnswersLate,
    /// A rejected version is claimed as held.
    ClaimsWhatItRejected,
    /// One invalid resource prevents the others of its push from applying.
    AllOrNothing,
    /// Removals in a response with resources are ignored.
    MissesRemovals,
    /// The placeholder of a policy outlives it.
    KeepsPlaceholders,
    /// New names are sent in the next answer.
    NamesInAnAnswer,
    /// A type without subscription is accepted.
    AcceptsAnyType,
    /// Held resources are not claimed on the next stream.
    ForgetsVersions,
    /// Claims beyond the limit are left out, and resources that disappeared meanwhile stay.
    KeepsWhatIsUnsaid,
    /// Names that are added while disconnected are lost.
    ForgetsWants,
    /// Names that are no longer wanted are kept.
    NeverForgets,
    /// The delay is not doubled.
    NeverBacksOff,
}

impl Fault {
    pub(super) const WRONG: [Self; 13] = [
        Self::KeepsTheNonce,
        Self::AnswersLate,
        Self::ClaimsWhatItRejected,
        Self::AllOrNothing,
        Self::MissesRemovals,
        Self::KeepsPlaceholders,
        Self::NamesInAnAnswer,
        Self::AcceptsAnyType,
        Self::ForgetsVersions,
        Self::KeepsWhatIsUnsaid,
        Self::ForgetsWants,
        Self::NeverForgets,
        Self::NeverBacksOff,
    ];
}

/// Client with a fault.
pub(super) struct FaultyClient {
    pub(super) client: Client,
    fault: Fault,
    connected: bool,
    last: Option<Request>,
    names: Vec<String>,
    wanted: BTreeSet<String>,
}

impl FaultyClient {
    pub(super) fn new(fault: Fault) -> Self {
        let limits = match fault {
            Fault::KeepsWhatIsUnsaid => Limits::default(),
            _ => Limits { initial_versions_bytes: CLAIMS_MAX, ..Limits::default() },
        };
        Self {
            client: Client::with_limits(TYPES.to_vec(), limits),
            fault,
            connected: false,
            last: None,
            names: Vec::new(),
            wanted: BTreeSet::new(),
        }
    }

    /// Restarts with empty state.
    pub(super) fn restart(&mut self) {
        *self = Self::new(self.fault);
    }

    pub(super) fn connected(&mut self) -> Vec<Request> {
        self.connected = true;
        let mut requests = self.client.connected();
        let last = self.last.take();
        match (self.fault, last) {
            (Fault::KeepsTheNonce, Some(last)) => {
                for request in &mut requests {
                    request.nonce.clone_from(&last.nonce);
                }
            }
            (Fault::AnswersLate, Some(last)) => requests.push(last),
            (Fault::ForgetsVersions, _) => {
                for request in &mut requests {
                    request.initial_versions.clear();
                }
            }
            (Fault::KeepsWhatIsUnsaid, _) => {
                let wildcard = |request: &&mut Request| request.type_url != DEMAND;
                for request in requests.iter_mut().filter(wildcard) {
                    let claims = request.initial_versions.iter();
                    let claims = claims.map(|(name, version)| initial_version_bytes(name, version));
                    if claims.sum::<usize>() > CLAIMS_MAX {
                        request.initial_versions.clear();
                    }
                }
            }
            (Fault::ClaimsWhatItRejected, _) => {
                for (type_url, name, _, version) in self.client.rejected() {
                    let same = |request: &&mut Request| request.type_url == type_url;
                    if let Some(request) = requests.iter_mut().find(same) {
                        let versions = &mut request.initial_versions;
                        versions.insert(name.to_owned(), version.to_owned());
                    }
                }
            }
            _ => {}
        }
        requests
    }

    pub(super) fn received(&mut self, mut response: Response, store: &mut Store) -> Vec<Request> {
        let has_resources = !response.resources.is_empty();
        if self.fault == Fault::MissesRemovals && has_resources {
            response.removed.clear();
        }
        if self.fault == Fault::KeepsPlaceholders {
            let held = store.held.get(response.type_url.as_str());
            let version = |name: &String| held.and_then(|held| held.get(name));
            let has_placeholder = |name: &String| version(name).is_some_and(String::is_empty);
            response.removed.retain(|name| !has_placeholder(name));
        }
        let mut requests = self.apply(response, store);
        for request in &mut requests {
            match self.fault {
                Fault::NamesInAnAnswer => request.subscribe = std::mem::take(&mut self.names),
                Fault::AcceptsAnyType if matches!(request.type_url, Cow::Owned(_)) => {
                    request.error = None;
                }
                _ => {}
            }
        }
        self.last = requests.last().cloned();
        requests
    }

    fn apply(&mut self, response: Response, store: &mut Store) -> Vec<Request> {
        if self.fault != Fault::AllOrNothing {
            return self.client.received(response, store);
        }
        let (client, held) = (self.client.clone(), store.clone());
        let requests = self.client.received(response, store);
        if requests.iter().any(|request| request.error.is_some()) {
            (self.client, *store) = (client, held);
        }
        requests
    }

    pub(super) fn want(&mut self, names: &BTreeSet<String>, store: &mut Store) -> Vec<Request> {
        let known = |name: &&String| self.wanted.contains(*name);
        let names = match self.fault {
            Fault::ForgetsWants if !self.connected => names.iter().filter(known).cloned().collect(),
            Fault::NeverForgets => names.union(&self.wanted).cloned().collect(),
            _ => names.clone(),
        };
        let mut requests = self.client.set_wanted(DEMAND, &names, store);
        self.wanted = names;
        if self.fault == Fault::NamesInAnAnswer {
            for request in requests.extract_if(.., |request| request.unsubscribe.is_empty()) {
                self.names.extend(request.subscribe);
            }
        }
        requests
    }

    pub(super) fn disconnected(&mut self, end: StreamEnd) -> Duration {
        self.connected = false;
        let wait = self.client.disconnected(end);
        match self.fault {
            Fault::NeverBacksOff => Duration::from_millis(10),
            _ => wait,
        }
    }
}
