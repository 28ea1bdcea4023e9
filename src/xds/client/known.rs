//! State of one subscribed type: held, wanted and rejected resources.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher as _, RandomState};
use std::mem;
use std::sync::Arc;

use foldhash::{HashMap, HashSet};

use super::messages::{
    Mode, Removals, Request, Resource, ResourceStore, Response, SHARED_PLACEHOLDER, Subscription,
    WILDCARD,
};
use super::rejected::{NackBuilder, Rejected, check_name, truncate};
use super::usage::{Usage, accounted_bytes};

/// Bytes of an unexpected type URL that a reason repeats.
const TYPE_BYTES_MAX: usize = 128;

/// State of one type, which outlives streams.
#[derive(Clone, Debug)]
pub(super) struct TypeState {
    pub(super) subscription: Subscription,
    /// Last accepted version of every resource.
    held: HashMap<Arc<str>, HeldResource>,
    subscribed_names: BTreeSet<Arc<str>>,
    /// Size of those names in a request, in bytes.
    wanted_bytes: usize,
    /// Subscribed names without an answer so far.
    pub(super) unanswered: BTreeSet<Arc<str>>,
    /// True if held resources were restored from disk and have not been compared with the
    /// wanted names.
    has_unchecked_restored: bool,
    pub(super) rejected: Rejected,
    /// True after a usable response on this stream or an earlier one.
    pub(super) had_usable_response: bool,
    /// True until the first response on this stream.
    pub(super) awaits_first_response: bool,
    /// True if a placeholder exists for rejected resources that cannot be held under their
    /// names.
    has_shared_placeholder: bool,
    /// True if the request left out the held versions, so that the first response lists all
    /// resources.
    omitted_initial_versions: bool,
    key: RandomState,
}

#[derive(Clone, Debug)]
struct HeldResource {
    version: Version,
    /// Size that counts against the limits. It includes the body, which the store keeps in
    /// another form.
    bytes: usize,
}

/// Version of a held resource, in the size of one string.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Version {
    /// Version from the server. Empty for the placeholder of a rejected resource, and for a
    /// resource that was restored without a version. Resources of one push share it.
    Received(Arc<str>),
    /// Digest of a resource without a version, such as istiod's clusters and policies.
    Digest(u64),
}

const _: () = assert!(size_of::<Version>() == size_of::<Arc<str>>());

impl Version {
    /// Returns the version to send in the next stream's `initial_resource_versions`.
    fn initial_version(&self) -> &str {
        match self {
            Self::Received(version) => version,
            Self::Digest(_) => "",
        }
    }
}

impl TypeState {
    pub(super) fn new(subscription: Subscription) -> Self {
        Self {
            subscription,
            held: HashMap::default(),
            subscribed_names: BTreeSet::new(),
            wanted_bytes: 0,
            unanswered: BTreeSet::new(),
            has_unchecked_restored: false,
            rejected: Rejected::default(),
            had_usable_response: false,
            awaits_first_response: true,
            has_shared_placeholder: false,
            omitted_initial_versions: false,
            key: RandomState::new(),
        }
    }

    fn on_demand(&self) -> bool {
        self.subscription.mode == Mode::OnDemand
    }

    /// Builds the first request of a stream.
    ///
    /// Wanted names are subscribed to, and held resources are listed in the versions. Some
    /// servers treat both as wanted names, others only the first. The versions are left out if
    /// they would exceed `claims_max` bytes.
    pub(super) fn first_request(&mut self, claims_max: usize) -> Request {
        self.awaits_first_response = true;
        let is_again = self.omitted_initial_versions && !self.on_demand();
        let claim = |(name, held): (&Arc<str>, &HeldResource)| {
            initial_version_bytes(name, held.version.initial_version())
        };
        let missing = || self.subscribed_names.iter().filter(|name| !self.held.contains_key(*name));
        let claims = self.held.iter().map(claim).sum::<usize>();
        let claims = claims + missing().map(|name| initial_version_bytes(name, "")).sum::<usize>();
        let mut versions = BTreeMap::new();
        let unclaimed = is_again || claims > claims_max;
        if !unclaimed {
            let held = self.held.iter();
            versions.extend(
                held.map(|(name, of)| (name.to_string(), of.version.initial_version().to_owned())),
            );
            versions.extend(missing().map(|name| (name.to_string(), String::new())));
        }
        self.omitted_initial_versions = unclaimed;
        let (mut subscribe, mut unsubscribe) = (Vec::new(), Vec::new());
        if self.on_demand() {
            subscribe.extend(self.subscribed_names.iter().map(|name| name.to_string()));
            if subscribe.is_empty() {
                // An empty list would subscribe to everything, so this subscribes to nothing
                // explicitly.
                subscribe.push(WILDCARD.to_owned());
                unsubscribe.push(WILDCARD.to_owned());
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

    /// Has the next stream request all resources again. Those that are held stay until its first
    /// response.
    pub(super) fn request_all(&mut self) {
        let versions = self.held.values_mut().map(|held| &mut held.version);
        versions.for_each(|version| *version = Version::Received(Arc::default()));
        self.omitted_initial_versions = true;
        self.had_usable_response = false;
        self.unanswered.clone_from(&self.subscribed_names);
    }

    /// Applies the valid part of a response. Returns the NACK message for the rest.
    pub(super) fn apply(
        &mut self,
        response: &Response,
        usage: &mut Usage,
        resources: &mut impl ResourceStore,
    ) -> Option<String> {
        let fresh = mem::take(&mut self.awaits_first_response);
        if fresh {
            self.rejected.clear_all()
        } else {
            self.rejected.remove_unnamed()
        }
        // Rejected resources that cannot be held are not in the initial versions, so the first
        // response of a stream contains them again.
        let was_unplaced = fresh && mem::take(&mut self.has_shared_placeholder);
        let type_url = self.subscription.type_url;
        let unclaimed = mem::take(&mut self.omitted_initial_versions);
        let contradictions = contradictions(response);
        let is_complete = unclaimed || resources.is_complete_state(type_url, response);
        let removed = response.removed.iter();
        let removed = removed.filter(|name| !contradictions.contains_key(name.as_str()));
        let gone = self.gone(response, removed.clone(), is_complete);
        let (held, held_of_all) = (self.held.len(), usage.entries());
        let is_new = |one: &&Resource| {
            let is_known = self.held.contains_key(&*one.name);
            !gone.is_empty() && !is_known && !contradictions.contains_key(&*one.name)
        };
        let added: Vec<_> = response.resources.iter().filter(is_new).collect();
        let removals = Removals { is_first: fresh, held, held_of_all, gone: &gone, added: &added };
        resources.announce(type_url, &removals);
        // Removals come first: an address may move from a removed resource to a new one.
        for name in removed {
            self.rejected.clear(name);
        }
        for name in &gone {
            self.remove(name, usage, resources);
        }
        let mut nack = NackBuilder::default();
        for (name, (version, reason)) in &contradictions {
            nack.add(name, reason);
            self.reject(name, version, reason, usage, resources);
        }
        self.reserve(response.resources.len());
        resources.announce_upserts(type_url, &response.resources.iter().collect::<Vec<_>>());
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
        resources.announce_upserts(type_url, &[]);
        if was_unplaced && !self.has_shared_placeholder {
            resources.remove(self.subscription.type_url, SHARED_PLACEHOLDER);
        }
        self.mark_answered(response);
        let error = nack.message();
        // The server does not send a rejected resource again, so waiting for a clean response
        // could last forever.
        self.had_usable_response |= error.is_none() || !self.held.is_empty();
        error
    }

    fn accept(
        &mut self,
        resource: &Resource,
        usage: &mut Usage,
        resources: &mut impl ResourceStore,
    ) -> Result<(), String> {
        let type_url = self.subscription.type_url;
        check_name(&resource.name)?;
        let Some(body) = resource.body.as_deref() else {
            return Err("it has no body".to_owned());
        };
        if *resource.body_type != *type_url {
            let other = truncate(&resource.body_type, TYPE_BYTES_MAX);
            return Err(format!("body: type {other:?}, want {type_url}"));
        }
        let body = if resources.uses_bodies(type_url) { body } else { &[] };
        let version = self.version(resource, body);
        let old = self.held.get(&*resource.name);
        // istiod sends all of its clusters again with each push. Equal server versions may
        // still have different bodies, so only digests are compared.
        if old.is_some_and(|old| matches!(version, Version::Digest(_)) && old.version == version) {
            return Ok(());
        }
        let old = old.map(|held| held.bytes);
        let new = body.len() + accounted_bytes(&resource.name, &resource.version);
        let before = usage.clone();
        usage.put(old, new)?;
        if let Err(reason) = resources.upsert(type_url, resource) {
            *usage = before;
            return Err(reason);
        }
        self.hold(&resource.name, version, new);
        if self.on_demand() && !self.subscribed_names.contains(&resource.name) {
            self.remove(&resource.name, usage, resources);
        }
        Ok(())
    }

    /// Returns the version of a resource, or a digest if the server sends none. The digest is
    /// keyed, so that nobody can forge a resource with the digest of another one.
    fn version(&self, resource: &Resource, body: &[u8]) -> Version {
        match &*resource.version {
            "" => Version::Digest(self.key.hash_one(body)),
            _ => Version::Received(Arc::clone(&resource.version)),
        }
    }

    /// Marks the names of a response as answered, including rejected ones.
    fn mark_answered(&mut self, response: &Response) {
        for resource in &response.resources {
            self.unanswered.remove(&*resource.name);
        }
        for name in &response.removed {
            self.unanswered.remove(&**name);
        }
    }

    /// Records a rejection. If no version is held, the placeholder is held without a version.
    /// All resources without a usable name or beyond the limits share one placeholder, which is
    /// not held and does not count.
    fn reject(
        &mut self,
        name: &str,
        version: &str,
        reason: &str,
        usage: &mut Usage,
        resources: &mut impl ResourceStore,
    ) {
        self.rejected.put(name, version, reason);
        let type_url = self.subscription.type_url;
        if self.held.contains_key(name) {
            return;
        }
        if check_name(name).is_ok() {
            if !resources.handle_rejection(type_url, name) {
                return;
            }
            let bytes = accounted_bytes(name, "");
            if usage.put(None, bytes).is_ok() {
                let version = Version::Received(Arc::default());
                return self.hold(&name.into(), version, bytes);
            }
            resources.remove(type_url, name);
        }
        self.has_shared_placeholder |= resources.handle_rejection(type_url, SHARED_PLACEHOLDER);
    }

    /// Records a held resource, replacing the one of the same name.
    fn hold(&mut self, name: &Arc<str>, version: Version, bytes: usize) {
        self.held.insert(Arc::clone(name), HeldResource { version, bytes });
    }

    /// Returns the held resources that a response removes, in their order: those that it names as
    /// removed and, if it is complete, those that it does not send. Rejections of resources that a
    /// complete response sends remain.
    fn gone<'a>(
        &mut self,
        response: &Response,
        removed: impl Iterator<Item = &'a String>,
        is_complete: bool,
    ) -> Vec<Arc<str>> {
        let removed = removed.filter_map(|name| Some(self.held.get_key_value(&**name)?.0));
        let mut gone: Vec<_> = removed.cloned().collect();
        if is_complete {
            let named: HashSet<&str> = response.resources.iter().map(|one| &*one.name).collect();
            gone.extend(self.held.keys().filter(|name| !named.contains(&***name)).cloned());
            self.rejected.retain_named(&named);
        }
        gone.sort_unstable();
        gone.dedup();
        gone
    }

    fn remove(&mut self, name: &str, usage: &mut Usage, resources: &mut impl ResourceStore) {
        if let Some(held) = self.held.remove(name) {
            usage.drop(held.bytes);
            resources.remove(self.subscription.type_url, name);
        }
    }

    /// Replaces the wanted names. Returns the added names and the removed ones. The removed
    /// names include unwanted resources that were restored from disk.
    pub(super) fn set_wanted(
        &mut self,
        names: &BTreeSet<String>,
        usage: &mut Usage,
        resources: &mut impl ResourceStore,
    ) -> (Vec<String>, Vec<String>) {
        if !self.on_demand() {
            return (Vec::new(), Vec::new());
        }
        let gone = self.subscribed_names.iter().filter(|name| !names.contains(&***name));
        let gone: Vec<_> = gone.cloned().collect();
        for name in &gone {
            self.subscribed_names.remove(name);
            self.wanted_bytes -= initial_version_bytes(name, "");
            self.unanswered.remove(name);
            self.rejected.clear(name);
            usage.drop(accounted_bytes(name, ""));
        }
        let new = names.iter().filter(|name| self.add_wanted(name, usage));
        let new: Vec<_> = new.cloned().collect();
        let mut gone: BTreeSet<_> = gone.iter().map(|name| name.to_string()).collect();
        if mem::take(&mut self.has_unchecked_restored) || !gone.is_empty() {
            let unwanted = self.held.keys().filter(|name| !self.subscribed_names.contains(*name));
            let mut unwanted: Vec<_> = unwanted.cloned().collect();
            unwanted.sort_unstable();
            for name in unwanted {
                self.rejected.clear(&name);
                self.remove(&name, usage, resources);
                gone.insert(name.to_string());
            }
        }
        (new, gone.into_iter().collect())
    }

    /// Adds a wanted name. Returns false if it is already wanted, unusable or beyond the
    /// limits.
    fn add_wanted(&mut self, name: &str, usage: &mut Usage) -> bool {
        let bytes = self.wanted_bytes + initial_version_bytes(name, "");
        let fits = check_name(name).is_ok() && bytes <= usage.limits.wanted;
        if self.subscribed_names.contains(name)
            || !fits
            || usage.put(None, accounted_bytes(name, "")).is_err()
        {
            return false;
        }
        let name = Arc::<str>::from(name);
        if !self.held.contains_key(&name) {
            self.unanswered.insert(Arc::clone(&name));
        }
        self.wanted_bytes = bytes;
        self.subscribed_names.insert(name)
    }

    /// Makes room for the first resources.
    pub(super) fn reserve(&mut self, resources: usize) {
        if self.held.is_empty() {
            self.held.reserve(resources);
        }
    }

    /// Records a resource that an earlier run accepted. Returns false beyond the limits; the
    /// first response is then expected to contain it again.
    pub(super) fn restore(
        &mut self,
        name: &Arc<str>,
        version: &Arc<str>,
        body: usize,
        usage: &mut Usage,
    ) -> bool {
        let old = self.held.get(name).map(|held| held.bytes);
        let new = body + accounted_bytes(name, version);
        if check_name(name).is_err() || usage.put(old, new).is_err() {
            self.has_shared_placeholder = true;
            return false;
        }
        self.hold(name, Version::Received(Arc::clone(version)), new);
        self.has_unchecked_restored = true;
        true
    }

    pub(super) fn len(&self) -> usize {
        self.held.len()
    }
}

/// Returns the largest size of a name and its version in a request, in bytes.
pub(super) fn initial_version_bytes(name: &str, version: &str) -> usize {
    // Three tags and three lengths, of at most three bytes each.
    const OVERHEAD: usize = 12;
    name.len() + version.len() + OVERHEAD
}

/// Returns the names with contradictory entries in a response, each with a version and the
/// reason. The intended entry is unknown, so the held version stays.
fn contradictions(response: &Response) -> BTreeMap<&str, (&str, &'static str)> {
    if response.resources.len() + response.removed.len() < 2 {
        return BTreeMap::new();
    }
    let removed: HashSet<&str> = response.removed.iter().map(String::as_str).collect();
    let mut seen = HashSet::default();
    seen.reserve(response.resources.len());
    let mut found = BTreeMap::new();
    for Resource { name, version, .. } in &response.resources {
        if check_name(name).is_err() {
            continue;
        }
        if removed.contains(&**name) {
            found.insert(&**name, (&**version, "both sent and removed in one response"));
        } else if !seen.insert(&**name) {
            found.insert(&**name, (&**version, "sent twice in one response"));
        }
    }
    found
}
