//! Machines that are wrong on purpose, to see that the model tells.
//!
//! Each does what a real client could do by mistake: around the right machine, what goes in, comes
//! out or is kept is changed.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::time::Duration;

use super::{CLAIMS_MAX, DEMAND, Store, TYPES};
use crate::xds::client::known::claim_bytes;
use crate::xds::client::usage::Limits;
use crate::xds::client::{Client, End, Request, Response};

/// What is wrong with a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    Nothing,
    /// The first requests of a stream carry the last nonce of the stream before.
    KeepsTheNonce,
    /// An answer that was made too late is sent on the next stream.
    AnswersLate,
    /// A rejected version is claimed to be held.
    ClaimsWhatItRejected,
    /// One bad resource keeps the others of its push from applying.
    AllOrNothing,
    /// Removals that come with resources are passed over.
    MissesRemovals,
    /// What stands in for a policy outlives it.
    KeepsStandIns,
    /// New names ride on the next answer.
    NamesInAnAnswer,
    /// A type that nobody subscribed to is accepted.
    AcceptsAnyType,
    /// What is held is not claimed on the next stream.
    ForgetsVersions,
    /// What was too much to claim is not claimed, and what has gone meanwhile stays.
    KeepsWhatIsUnsaid,
    /// What is wanted while there is no stream is not remembered.
    ForgetsWants,
    /// What is wanted no more is kept all the same.
    NeverForgets,
    /// The wait is not doubled.
    NeverBacksOff,
}

impl Fault {
    pub(super) const WRONG: [Self; 13] = [
        Self::KeepsTheNonce,
        Self::AnswersLate,
        Self::ClaimsWhatItRejected,
        Self::AllOrNothing,
        Self::MissesRemovals,
        Self::KeepsStandIns,
        Self::NamesInAnAnswer,
        Self::AcceptsAnyType,
        Self::ForgetsVersions,
        Self::KeepsWhatIsUnsaid,
        Self::ForgetsWants,
        Self::NeverForgets,
        Self::NeverBacksOff,
    ];
}

/// The machine, with its fault.
pub(super) struct Machine {
    pub(super) client: Client,
    fault: Fault,
    connected: bool,
    last: Option<Request>,
    names: Vec<String>,
    wanted: BTreeSet<String>,
}

impl Machine {
    pub(super) fn new(fault: Fault) -> Self {
        let limits = match fault {
            Fault::KeepsWhatIsUnsaid => Limits::default(),
            _ => Limits {
                claims: CLAIMS_MAX,
                ..Limits::default()
            },
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

    /// A new process: nothing is known any more.
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
                    let claims = claims.map(|(name, version)| claim_bytes(name, version));
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
        if self.fault == Fault::KeepsStandIns {
            let held = store.held.get(response.type_url.as_str());
            let version = |name: &String| held.and_then(|held| held.get(name));
            let stands_in = |name: &String| version(name).is_some_and(String::is_empty);
            response.removed.retain(|name| !stands_in(name));
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
        let mut requests = self.client.want(DEMAND, &names, store);
        self.wanted = names;
        if self.fault == Fault::NamesInAnAnswer {
            for request in requests.extract_if(.., |request| request.unsubscribe.is_empty()) {
                self.names.extend(request.subscribe);
            }
        }
        requests
    }

    pub(super) fn disconnected(&mut self, end: End) -> Duration {
        self.connected = false;
        let wait = self.client.disconnected(end);
        match self.fault {
            Fault::NeverBacksOff => Duration::from_millis(10),
            _ => wait,
        }
    }
}
