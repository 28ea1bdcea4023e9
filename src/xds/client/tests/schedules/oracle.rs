//! Reference implementation of the client's rules, as simple as possible, and checks of its
//! requests.

use super::*;

/// Expected record of a held resource.
#[derive(Clone, Debug)]
pub(super) struct ExpectedResource {
    pub(super) version: String,
    /// Bytes of the body; 0 for a resource restored from disk.
    body: usize,
}

#[derive(Debug, Default)]
pub(super) struct Oracle {
    pub(super) held: BTreeMap<&'static str, BTreeMap<String, ExpectedResource>>,
    /// Wanted names of the on-demand type.
    pub(super) wanted: BTreeSet<String>,
    /// Wanted names without an answer so far.
    requested: BTreeSet<String>,
    rejected: BTreeMap<&'static str, BTreeSet<String>>,
    /// Types without a response on this stream.
    fresh: BTreeSet<&'static str>,
    /// Types on this stream whose versions were too many to claim.
    pub(super) unclaimed: BTreeSet<&'static str>,
    synced: BTreeSet<&'static str>,
    /// True if a policy that cannot be held was rejected, until the first response of a later
    /// stream has none.
    pub(super) unplaced: bool,
    failures: u32,
}

impl Oracle {
    /// Restarts with the names and versions that the previous process wrote to disk.
    pub(super) fn restart(&mut self) {
        let (held, unplaced) = (std::mem::take(&mut self.held), self.unplaced);
        *self = Self::default();
        (self.held, self.unplaced) = (held, unplaced);
        for kept in self.held.values_mut().flat_map(BTreeMap::values_mut) {
            kept.body = 0;
        }
    }

    fn answers(&self, name: &str) -> bool {
        let held = self.held.get(DEMAND);
        held.is_some_and(|held| held.contains_key(name))
    }

    /// Checks the first requests of a stream.
    pub(super) fn check_first(&mut self, requests: &[Request]) -> Result<()> {
        ensure!(requests.len() == TYPES.len(), "{} requests", requests.len());
        for (request, subscription) in requests.iter().zip(TYPES) {
            let type_url = subscription.type_url;
            let held = self.held.get(type_url).into_iter().flatten();
            let mut versions: BTreeMap<String, String> =
                held.map(|(name, kept)| (name.clone(), kept.version.clone())).collect();
            let (mut subscribe, mut unsubscribe) = (Vec::new(), Vec::new());
            if subscription.mode == Mode::OnDemand {
                let missing = self.wanted.iter().filter(|name| !self.answers(name));
                versions.extend(missing.map(|name| (name.clone(), String::new())));
            }
            let claims = versions.iter().map(|(name, of)| name.len() + of.len() + 12);
            self.unclaimed.remove(type_url);
            if claims.sum::<usize>() > CLAIMS_MAX {
                versions.clear();
                self.unclaimed.insert(type_url);
            }
            if subscription.mode == Mode::OnDemand {
                subscribe = self.wanted.iter().cloned().collect();
                if subscribe.is_empty() {
                    (subscribe, unsubscribe) = (vec!["*".into()], vec!["*".into()]);
                }
            }
            let expected = Request {
                type_url: type_url.into(),
                nonce: String::new(),
                subscribe,
                unsubscribe,
                initial_versions: versions,
                error: None,
                with_node: true,
            };
            ensure!(*request == expected, "{request:?}\ninstead of {expected:?}");
        }
        self.fresh = TYPES.iter().map(|one| one.type_url).collect();
        Ok(())
    }

    /// Applies a response. Returns the names of the rejected resources; none if the type itself
    /// is rejected.
    pub(super) fn deliver(&mut self, response: &Response) -> Option<BTreeSet<String>> {
        let type_url = subscription(&response.type_url)?.type_url;
        let held = self.held.entry(type_url).or_default();
        let rejected = self.rejected.entry(type_url).or_default();
        if self.fresh.remove(type_url) {
            rejected.clear();
            self.unplaced &= type_url != POLICY;
            if self.unclaimed.remove(type_url) {
                let named = |name: &str| response.resources.iter().any(|one| *one.name == *name);
                held.retain(|name, _| named(name));
            }
        }
        rejected.remove("");
        let mut now = BTreeSet::new();
        for resource in &response.resources {
            let name = &resource.name;
            if is_good(response, resource) {
                rejected.remove(&**name);
                let version = resource.version.to_string();
                let body = resource.body.as_ref().map_or(0, Bytes::len);
                if type_url != DEMAND || self.wanted.contains(&**name) {
                    held.insert(name.to_string(), ExpectedResource { version, body });
                }
            } else {
                now.insert(name.to_string());
                let usable = **name != *"*" && name.len() <= 2048;
                let name = if usable { name } else { "" };
                rejected.insert(name.to_owned());
            }
        }
        for name in &response.removed {
            if !now.contains(name) {
                held.remove(name);
                rejected.remove(name);
            }
        }
        // A policy of which no version is held has a placeholder.
        let usable = |name: &&String| !["", "*"].contains(&name.as_str()) && name.len() <= 2048;
        self.unplaced |= type_url == POLICY && !now.iter().all(|name| usable(&name));
        for name in now.iter().filter(usable).filter(|_| type_url == POLICY) {
            held.entry(name.clone())
                .or_insert(ExpectedResource { version: String::new(), body: 0 });
        }
        if now.is_empty() || !held.is_empty() {
            self.synced.insert(type_url);
        }
        if type_url == DEMAND {
            self.note_answers(response);
        }
        Some(now)
    }

    /// Marks the names of a response as answered.
    fn note_answers(&mut self, response: &Response) {
        let sent = response.resources.iter().map(|one| &*one.name);
        let named: BTreeSet<&str> =
            sent.chain(response.removed.iter().map(String::as_str)).collect();
        self.requested.retain(|name| !named.contains(name.as_str()));
    }

    /// Replaces the wanted names. Returns the added and the removed names that the requests
    /// must contain.
    pub(super) fn want(&mut self, names: BTreeSet<String>) -> (Vec<String>, Vec<String>) {
        let new: Vec<_> = names.difference(&self.wanted).cloned().collect();
        let mut gone: BTreeSet<_> = self.wanted.difference(&names).cloned().collect();
        let rejected = self.rejected.entry(DEMAND).or_default();
        self.wanted = names;
        let held = self.held.entry(DEMAND).or_default();
        held.retain(|own, _| {
            let keep = self.wanted.contains(own);
            if !keep {
                gone.insert(own.clone());
            }
            keep
        });
        rejected.retain(|name| !gone.contains(name));
        self.requested.retain(|name| self.wanted.contains(name));
        let open: Vec<_> = new.iter().filter(|name| !self.answers(name)).cloned().collect();
        self.requested.extend(open);
        (new, gone.into_iter().collect())
    }

    /// Returns whether a response of the type was received on this stream.
    pub(super) fn has_response(&self, type_url: &str) -> bool {
        !self.fresh.contains(type_url)
    }

    /// Returns the expected delay after an end.
    pub(super) fn wait(&mut self, end: StreamEnd) -> Duration {
        if !matches!(end, StreamEnd::Connect | StreamEnd::Status) {
            self.failures = 0;
        }
        let wait = Duration::from_millis(10) * 2_u32.pow(self.failures.min(20));
        self.failures += 1;
        wait.min(Duration::from_secs(15))
    }

    /// Compares the whole state.
    pub(super) fn check_state(&self, client: &Client, store: &Store) -> Result<()> {
        for subscription in TYPES {
            let type_url = subscription.type_url;
            let (held, expected) = (store.held.get(type_url), self.held.get(type_url));
            let versions = expected.into_iter().flatten().map(|(name, kept)| (name, &kept.version));
            let same = held.into_iter().flatten().eq(versions);
            ensure!(same, "{held:?} instead of {expected:?}");
            let count = expected.map_or(0, BTreeMap::len);
            ensure!(client.held(type_url) == count, "held by the machine");
        }
        ensure!(store.unplaced == self.unplaced, "what has no place");
        let rejected = client.rejected().map(|(url, name, ..)| (url, name));
        let expected = TYPES.iter().flat_map(|one| {
            let names = self.rejected.get(one.type_url).into_iter().flatten();
            names.map(|name| (one.type_url, name.as_str()))
        });
        let same = rejected.eq(expected);
        ensure!(same, "rejected: {:?}", client.rejected().collect::<Vec<_>>());
        let pending: Vec<_> = client.pending().collect();
        let wildcard = TYPES.iter().filter(|one| one.mode == Mode::Wildcard);
        let expected = wildcard.map(|one| one.type_url);
        let expected: Vec<_> = expected.filter(|url| !self.synced.contains(url)).collect();
        ensure!(pending == expected, "{pending:?} are pending");
        ensure!(client.is_synced() == expected.is_empty(), "synced");
        ensure!(client.usage.held() == self.usage(), "usage");
        let requested = client.unanswered(DEMAND);
        ensure!(requested == self.requested.len(), "{requested} of {:?}", self.requested);
        Ok(())
    }

    /// Returns the entries and bytes that count against the limits.
    fn usage(&self) -> (usize, usize) {
        let mut sum = (self.wanted.len(), 0);
        sum.1 += self.wanted.iter().map(|name| name.len() + 64).sum::<usize>();
        for (name, kept) in self.held.values().flatten() {
            sum.0 += 1;
            sum.1 += name.len() + kept.version.len() + 64 + kept.body;
        }
        sum
    }
}

/// Returns whether a resource of a response has to be accepted.
fn is_good(response: &Response, resource: &Resource) -> bool {
    let name = &resource.name;
    let same = response.resources.iter().filter(|one| one.name == *name);
    same.count() == 1
        && !response.removed.iter().any(|removed| **removed == **name)
        && !["", "*"].contains(&&**name)
        && name.len() <= 2048
        && resource.body.is_some()
        && *resource.body_type == *response.type_url
        && validate(resource).is_ok()
}

/// Checks the answer to a response with these rejected names. Returns whether it is an ACK.
pub(super) fn check_answer(
    response: &Response,
    requests: &[Request],
    rejected: Option<&BTreeSet<String>>,
) -> Result<bool> {
    let [answer] = requests else {
        bail!("{} answers to one response", requests.len());
    };
    let expected = Request {
        type_url: response.type_url.clone().into(),
        nonce: response.nonce.clone(),
        error: answer.error.clone(),
        ..Request::default()
    };
    ensure!(*answer == expected, "{answer:?} instead of {expected:?}");
    let good = rejected.is_some_and(BTreeSet::is_empty);
    ensure!(answer.error.is_none() == good, "{answer:?} on {response:?}");
    let (Some(error), Some(rejected)) = (&answer.error, rejected) else {
        return Ok(good);
    };
    ensure!(error.len() <= 4096, "{} bytes in a NACK", error.len());
    let more = error.rsplit_once("; and ");
    let more = more.and_then(|(_, more)| more.strip_suffix(" more")?.parse().ok());
    let named = |name: &&String| match name.as_str() {
        "" => error.contains("(no name): "),
        name => error.contains(&format!("{}: ", name.get(..2048).unwrap_or(name))),
    };
    let named = rejected.iter().filter(named).count();
    let left: usize = more.unwrap_or(0);
    ensure!(named + left >= rejected.len(), "{rejected:?} in {error}");
    Ok(good)
}
