//! Model server with istiod's behaviour. It serves wildcard and named subscriptions, skips
//! resources that the client has, does not resend after a NACK, and checks the client's
//! protocol.

use super::*;

/// Resource of the server.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub(super) version: String,
    /// True if a client can use the current version.
    pub(super) good: bool,
    /// Last valid version.
    good_version: Option<String>,
}

#[derive(Debug, Default)]
pub(super) struct Server {
    items: BTreeMap<&'static str, BTreeMap<String, Item>>,
    versions: u64,
    nonces: u64,
    stream: Option<Stream>,
}

/// State of one stream.
#[derive(Debug, Default)]
struct Stream {
    watches: BTreeMap<&'static str, Watch>,
    /// Types of the responses without an answer, by nonce.
    open: BTreeMap<String, String>,
}

/// State of one type on a stream.
#[derive(Debug)]
struct Watch {
    wildcard: bool,
    names: BTreeSet<String>,
    /// Names that the next response has to mention, as a resource or as removed.
    requested: BTreeSet<String>,
    /// Versions that the client has, as far as the server can tell.
    sent_versions: BTreeMap<String, String>,
    answered: bool,
}

impl Server {
    pub(super) fn items(&self, type_url: &str) -> impl Iterator<Item = (&String, &Item)> {
        self.items.get(type_url).into_iter().flatten()
    }

    pub(super) fn get(&self, type_url: &str, name: &str) -> Option<&Item> {
        self.items.get(type_url)?.get(name)
    }

    /// Adds a resource, or a new version of one.
    pub(super) fn put(&mut self, type_url: &'static str, name: &str, good: bool) {
        self.versions += 1;
        let version = format!("v{}", self.versions);
        let items = self.items.entry(type_url).or_default();
        let before = items.get(name).and_then(|item| item.good_version.clone());
        let good_version = if good { Some(version.clone()) } else { before };
        let item = Item { version, good, good_version };
        items.insert(name.to_owned(), item);
    }

    /// Reverts an invalid version to the last valid one. Returns false if there is none.
    pub(super) fn roll_back(&mut self, type_url: &str, name: &str) -> bool {
        let item = self.items.get_mut(type_url).and_then(|i| i.get_mut(name));
        let Some(item) = item.filter(|item| !item.good) else {
            return false;
        };
        let Some(version) = &item.good_version else {
            return false;
        };
        (item.version, item.good) = (version.clone(), true);
        true
    }

    pub(super) fn delete(&mut self, type_url: &str, name: &str) -> bool {
        let items = self.items.get_mut(type_url);
        items.is_some_and(|items| items.remove(name).is_some())
    }

    /// Opens a stream. Nonces may start again with it.
    pub(super) fn open(&mut self, nonces_anew: bool) {
        self.stream = Some(Stream::default());
        if nonces_anew {
            self.nonces = 0;
        }
    }

    pub(super) fn close(&mut self) {
        self.stream = None;
    }

    /// Returns the number of responses without an answer.
    pub(super) fn unanswered(&self) -> usize {
        self.stream.as_ref().map_or(0, |stream| stream.open.len())
    }

    /// Handles a request, or fails if it violates the protocol.
    pub(super) fn take(&mut self, request: &Request) -> Result<()> {
        let Some(stream) = &mut self.stream else {
            return Ok(());
        };
        let names = request.subscribe.len() + request.unsubscribe.len();
        let first = request.with_node || !request.initial_versions.is_empty();
        if !request.nonce.is_empty() {
            let response = stream.open.remove(&request.nonce);
            let same = response.is_some_and(|type_url| type_url == request.type_url);
            ensure!(same, "it answers nothing: {request:?}");
            ensure!(names == 0 && !first, "an answer with more: {request:?}");
            return Ok(());
        }
        let subscription = subscription(&request.type_url);
        let Some(subscription) = subscription else {
            anyhow::bail!("a request for no type of ours: {request:?}");
        };
        match stream.watches.get_mut(subscription.type_url) {
            Some(watch) => {
                ensure!(!first && names > 0, "a request for nothing: {request:?}");
                watch.change(request);
            }
            None => {
                ensure!(request.with_node, "the node is missing: {request:?}");
                let watch = Watch::new(request);
                let wildcard = subscription.mode == Mode::Wildcard;
                ensure!(watch.wildcard == wildcard, "the other mode: {request:?}");
                stream.watches.insert(subscription.type_url, watch);
            }
        }
        Ok(())
    }

    /// Returns the next response of a type, if there are changes or it is the first one.
    pub(super) fn respond(&mut self, type_url: &'static str) -> Option<Response> {
        let watch = self.stream.as_mut()?.watches.get_mut(type_url)?;
        let items = self.items.entry(type_url).or_default();
        let (resources, removed) = watch.take_changes(type_url, items);
        let first = !std::mem::replace(&mut watch.answered, true);
        if resources.is_empty() && removed.is_empty() && !first {
            return None;
        }
        self.response(type_url, resources, removed)
    }

    /// Builds a response, whether or not it was requested.
    pub(super) fn response(
        &mut self,
        type_url: &str,
        resources: Vec<Resource>,
        removed: Vec<String>,
    ) -> Option<Response> {
        let stream = self.stream.as_mut()?;
        self.nonces += 1;
        let nonce = format!("n{}", self.nonces);
        stream.open.insert(nonce.clone(), type_url.to_owned());
        let type_url = type_url.to_owned();
        Some(Response { type_url, nonce, resources, removed })
    }
}

impl Watch {
    fn new(request: &Request) -> Self {
        let versions = &request.initial_versions;
        let mut names: BTreeSet<_> = request.subscribe.iter().chain(versions.keys()).collect();
        for name in &request.unsubscribe {
            names.remove(name);
        }
        let names: BTreeSet<String> = names.into_iter().cloned().collect();
        // Listed names count for every type. Their versions are ignored for policies, which are
        // sent again.
        let skips = request.type_url != POLICY;
        // Under a wildcard subscription, each name is a resource that the client holds or a
        // placeholder.
        let wildcard = request.type_url != DEMAND;
        let reported = versions.iter().filter(|(_, version)| wildcard || !version.is_empty());
        let reported = reported.map(|(name, version)| {
            let version = if skips { version.as_str() } else { "" };
            (name.clone(), version.to_owned())
        });
        Self {
            wildcard: request.subscribe.is_empty() || names.contains("*"),
            sent_versions: reported.collect(),
            requested: names.clone(),
            names,
            answered: false,
        }
    }

    fn change(&mut self, request: &Request) {
        for name in &request.subscribe {
            self.names.insert(name.clone());
            self.requested.insert(name.clone());
            // A subscription implies that the client has no version, whatever was sent before.
            self.sent_versions.remove(name);
        }
        for name in &request.unsubscribe {
            self.names.remove(name);
            self.requested.remove(name);
            self.sent_versions.remove(name);
        }
    }

    /// Returns changed resources and removed names, and records them as sent.
    fn take_changes(
        &mut self,
        type_url: &str,
        items: &BTreeMap<String, Item>,
    ) -> (Vec<Resource>, Vec<String>) {
        let mut resources = Vec::new();
        for (name, item) in items {
            let reported = self.sent_versions.get(name);
            let wanted = self.wildcard || reported.is_some() || self.names.contains(name);
            if wanted && reported != Some(&item.version) {
                resources.push(resource(type_url, name, item));
            }
        }
        let gone = |name: &&String| !items.contains_key(*name);
        let mut removed: Vec<String> = self.sent_versions.keys().filter(gone).cloned().collect();
        for name in std::mem::take(&mut self.requested) {
            let is_missing = !items.contains_key(&name) && !removed.contains(&name);
            if type_url == DEMAND && is_missing {
                removed.push(name);
            }
        }
        for name in &removed {
            self.sent_versions.remove(name);
        }
        let sent = resources.iter();
        self.sent_versions
            .extend(sent.map(|sent| (sent.name.to_string(), sent.version.to_string())));
        (resources, removed)
    }
}

/// Returns a resource to send. A body that starts with `bad` is invalid.
pub(super) fn resource(type_url: &str, name: &str, item: &Item) -> Resource {
    let body: &[u8] = if item.good { b"good" } else { b"bad" };
    Resource {
        name: name.into(),
        version: item.version.as_str().into(),
        body: Some(Bytes::from_static(body)),
        body_type: type_url.into(),
    }
}
