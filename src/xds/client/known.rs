//! What is known of one type: what is held, wanted and rejected.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::mem;
use std::sync::Arc;

use bytes::Bytes;

use super::messages::{ALL, Mode, Request, Resource, Resources, Response, Subscription, UNPLACED};
use super::rejected::{Nack, Rejected, clip, has_use};
use super::usage::{Usage, cost};

/// Bytes of a wrong type URL that are repeated in a reason.
const TYPE_BYTES_MAX: usize = 128;

/// One type, from its first request on; streams come and go.
#[derive(Clone, Debug)]
pub(super) struct Known {
    pub(super) subscription: Subscription,
    /// Every resource in its last accepted version.
    held: HashMap<Arc<str>, Held>,
    /// Who has an alias, the latest last. Wildcard types have none: nobody asks by alias.
    owners: HashMap<Arc<str>, Vec<Arc<str>>>,
    /// Names and aliases that were asked for.
    wanted: BTreeSet<Arc<str>>,
    pub(super) rejected: Rejected,
    /// There was a response, on this stream or before, of which something could be used.
    pub(super) synced: bool,
    /// No response came on this stream yet.
    fresh: bool,
    /// Something stands in for what was rejected and can be held by no name.
    unplaced: bool,
    /// The server was not told what is held, so that its first response names all there is.
    unclaimed: bool,
}

/// What is kept of an accepted resource.
#[derive(Clone, Debug)]
struct Held {
    version: Box<str>,
    aliases: Box<[Arc<str>]>,
    /// Bytes of the body, which others keep in another form.
    body: usize,
}

impl Known {
    pub(super) fn new(subscription: Subscription) -> Self {
        Self {
            subscription,
            held: HashMap::new(),
            owners: HashMap::new(),
            wanted: BTreeSet::new(),
            rejected: Rejected::default(),
            synced: false,
            fresh: true,
            unplaced: false,
            unclaimed: false,
        }
    }

    fn on_demand(&self) -> bool {
        self.subscription.mode == Mode::OnDemand
    }

    /// The first request of a stream.
    ///
    /// What is wanted is subscribed to by name, and what is held stands in the versions: Istio
    /// takes both for names that we want, others only the first. Where the versions of a wildcard
    /// type would be more than `claims_max` bytes, there are none.
    pub(super) fn first_request(&mut self, claims_max: usize) -> Request {
        self.fresh = true;
        let claim = |(name, held): (&Arc<str>, &Held)| claim_bytes(name, &held.version);
        let claims: usize = self.held.iter().map(claim).sum();
        self.unclaimed = !self.on_demand() && claims > claims_max;
        let held = self.held.iter().filter(|_| !self.unclaimed);
        let mut versions: BTreeMap<String, String> = held
            .map(|(name, held)| (name.to_string(), held.version.to_string()))
            .collect();
        let missing = self
            .wanted
            .iter()
            .filter(|name| self.resolve(name).is_none());
        versions.extend(missing.map(|name| (name.to_string(), String::new())));
        let (mut subscribe, mut unsubscribe) = (Vec::new(), Vec::new());
        if self.on_demand() {
            subscribe.extend(self.wanted.iter().map(|name| name.to_string()));
            if subscribe.is_empty() {
                // Nothing: an empty list would be everything.
                subscribe.push(ALL.to_owned());
                unsubscribe.push(ALL.to_owned());
            }
        }
        Request {
            type_url: Cow::Borrowed(self.subscription.type_url),
            subscribe,
            unsubscribe,
            initial_versions: versions,
            with_node: true,
            ..Request::default()
        }
    }

    /// Applies what is good of a response, and returns what the NACK says of the rest.
    pub(super) fn apply(
        &mut self,
        response: &Response,
        usage: &mut Usage,
        resources: &mut impl Resources,
    ) -> Option<String> {
        let fresh = mem::take(&mut self.fresh);
        match fresh {
            true => self.rejected.clear_all(),
            false => self.rejected.clear_nameless(),
        }
        // What is not held is not claimed, so the first response of a stream has it again.
        let was_unplaced = fresh && mem::take(&mut self.unplaced);
        if mem::take(&mut self.unclaimed) {
            self.keep_named(response, usage, resources);
        }
        let contradictions = contradictions(response);
        let mut nack = Nack::default();
        for (name, (version, reason)) in &contradictions {
            nack.add(name, reason);
            self.reject(name, version, reason, usage, resources);
        }
        // Removals first: an address may go from a resource that is removed to one that is new.
        for name in &response.removed {
            if !contradictions.contains_key(&**name) {
                self.rejected.clear(name);
                self.remove(name, usage, resources);
            }
        }
        for resource in &response.resources {
            let name = &*resource.name;
            if contradictions.contains_key(name) {
                continue;
            }
            match self.accept(resource, usage, resources) {
                Ok(()) => self.rejected.clear(name),
                Err(reason) => {
                    nack.add(name, &reason);
                    self.reject(name, &resource.version, &reason, usage, resources);
                }
            }
        }
        if was_unplaced && !self.unplaced {
            resources.remove(self.subscription.type_url, UNPLACED);
        }
        let error = nack.message();
        // One bad resource is no reason to wait for ever: the server does not send it again.
        self.synced |= error.is_none() || !self.held.is_empty();
        error
    }

    fn accept(
        &mut self,
        resource: &Resource,
        usage: &mut Usage,
        resources: &mut impl Resources,
    ) -> Result<(), String> {
        let type_url = self.subscription.type_url;
        has_use(&resource.name)?;
        let Some(body) = resource.body.as_ref().map(Bytes::len) else {
            return Err("it has no body".to_owned());
        };
        if resource.body_type != type_url {
            let other = clip(&resource.body_type, TYPE_BYTES_MAX);
            return Err(format!("its body is of the type {other:?}"));
        }
        let old = self.held.get(&*resource.name);
        let old = old.map(|held| held.cost(&resource.name));
        let aliases = match self.subscription.mode {
            Mode::Wildcard => &[],
            Mode::OnDemand => &*resource.aliases,
        };
        let aliases: BTreeSet<&str> = aliases.iter().map(String::as_str).collect();
        let new = body + cost(&resource.name, &resource.version, aliases.iter().copied());
        let before = usage.clone();
        usage.put(old, new)?;
        if let Err(reason) = resources.upsert(type_url, resource) {
            *usage = before;
            return Err(reason);
        }
        self.hold(&resource.name, &resource.version, &aliases, body);
        Ok(())
    }

    /// Notes a rejection, and holds without a version what stands in for what was rejected. What
    /// has no usable name or is beyond the limits is not held: one and the same stands in for all
    /// of that, and does not count.
    fn reject(
        &mut self,
        name: &str,
        version: &str,
        reason: &str,
        usage: &mut Usage,
        resources: &mut impl Resources,
    ) {
        self.rejected.put(name, version, reason);
        let type_url = self.subscription.type_url;
        if self.held.contains_key(name) {
            return;
        }
        if has_use(name).is_ok() {
            if !resources.rejected(type_url, name) {
                return;
            }
            let room = usage.put(None, cost(name, "", std::iter::empty()));
            if room.is_ok() {
                return self.hold(&name.into(), &Arc::default(), &BTreeSet::new(), 0);
            }
            resources.remove(type_url, name);
        }
        self.unplaced |= resources.rejected(type_url, UNPLACED);
    }

    /// Holds a resource, in place of what was held under its name.
    fn hold(&mut self, name: &Arc<str>, version: &str, aliases: &BTreeSet<&str>, body: usize) {
        let aliases = aliases.iter().map(|&alias| Arc::from(alias)).collect();
        let held = Held {
            version: version.into(),
            aliases,
            body,
        };
        let new = held.aliases.clone();
        if let Some(old) = self.held.insert(Arc::clone(name), held) {
            self.disown(name, &old);
        }
        for alias in new {
            self.owners.entry(alias).or_default().push(Arc::clone(name));
        }
    }

    /// Takes its aliases from a resource.
    fn disown(&mut self, name: &str, held: &Held) {
        for alias in &held.aliases {
            if let Some(owners) = self.owners.get_mut(alias) {
                owners.retain(|owner| **owner != *name);
                if owners.is_empty() {
                    self.owners.remove(alias);
                }
            }
        }
    }

    /// Removes what a response does not name that has all there is. What it has wrong stays.
    fn keep_named(
        &mut self,
        response: &Response,
        usage: &mut Usage,
        resources: &mut impl Resources,
    ) {
        let named: HashSet<&str> = response.resources.iter().map(|one| &*one.name).collect();
        let gone = self.held.keys().filter(|name| !named.contains(&***name));
        for name in gone.cloned().collect::<Vec<_>>() {
            self.remove(&name, usage, resources);
        }
    }

    fn remove(&mut self, name: &str, usage: &mut Usage, resources: &mut impl Resources) {
        if let Some(held) = self.held.remove(name) {
            self.disown(name, &held);
            usage.drop(held.cost(name));
            resources.remove(self.subscription.type_url, name);
        }
    }

    /// The name of the held resource that has this name or alias; of several with the alias, the
    /// one that came last.
    pub(super) fn resolve(&self, name: &str) -> Option<&str> {
        if let Some((name, _)) = self.held.get_key_value(name) {
            return Some(name);
        }
        self.owners.get(name)?.last().map(|name| &**name)
    }

    /// Wants a name or alias; says whether that is new.
    pub(super) fn want(&mut self, name: &str, usage: &mut Usage) -> bool {
        let new = self.on_demand() && has_use(name).is_ok() && !self.wanted.contains(name);
        let new = new && usage.put(None, cost(name, "", std::iter::empty())).is_ok();
        new && self.wanted.insert(Arc::from(name))
    }

    /// Wants a name or alias no more, nor what nobody wants by another one; says whether it was
    /// wanted.
    pub(super) fn forget(
        &mut self,
        name: &str,
        usage: &mut Usage,
        resources: &mut impl Resources,
    ) -> bool {
        if !self.wanted.remove(name) {
            return false;
        }
        usage.drop(cost(name, "", std::iter::empty()));
        self.rejected.clear(name);
        let by_name = self.held.get_key_value(name).map(|(name, _)| name);
        let by_alias = self.owners.get(name).into_iter().flatten();
        let answers: Vec<_> = by_name.into_iter().chain(by_alias).cloned().collect();
        for name in answers {
            if !self.is_wanted(&name) {
                self.rejected.clear(&name);
                self.remove(&name, usage, resources);
            }
        }
        true
    }

    /// Whether somebody wants this resource, by name or by alias.
    fn is_wanted(&self, name: &str) -> bool {
        let held = self.held.get(name);
        let mut aliases = held.into_iter().flat_map(|held| held.aliases.iter());
        self.wanted.contains(name) || aliases.any(|alias| self.wanted.contains(alias))
    }

    /// Holds what was accepted by another run; says whether there was room. Where there was none,
    /// the first response is expected to have it again, as what has no place.
    pub(super) fn restore(&mut self, name: &Arc<str>, version: &str, usage: &mut Usage) -> bool {
        let old = self.held.get(name).map(|held| held.cost(name));
        let new = cost(name, version, std::iter::empty());
        if has_use(name).is_err() || usage.put(old, new).is_err() {
            self.unplaced = true;
            return false;
        }
        self.hold(name, version, &BTreeSet::new(), 0);
        // Nobody else keeps it alive on the server.
        self.want(name, usage);
        true
    }

    /// How many resources are held.
    pub(super) fn len(&self) -> usize {
        self.held.len()
    }
}

/// What a name and its version take in a request, at most.
pub(super) fn claim_bytes(name: &str, version: &str) -> usize {
    // Three tags and three lengths, of at most three bytes each.
    const OVERHEAD: usize = 12;
    name.len() + version.len() + OVERHEAD
}

impl Held {
    fn cost(&self, name: &str) -> usize {
        let aliases = self.aliases.iter().map(|alias| &**alias);
        self.body + cost(name, &self.version, aliases)
    }
}

/// The names that a response says two things about, each with a version and what is wrong. Which of
/// the two is meant cannot be known, so what is held under the name stays.
fn contradictions(response: &Response) -> BTreeMap<&str, (&str, &'static str)> {
    let removed: HashSet<&str> = response.removed.iter().map(String::as_str).collect();
    let mut seen = HashSet::with_capacity(response.resources.len());
    let mut found = BTreeMap::new();
    for Resource { name, version, .. } in &response.resources {
        if has_use(name).is_err() {
            continue;
        }
        if removed.contains(&**name) {
            found.insert(&**name, (&**version, "it is both sent and removed"));
        } else if !seen.insert(&**name) {
            found.insert(&**name, (&**version, "it is sent twice"));
        }
    }
    found
}
