//! What goes into the machine and comes out of it: plain structs, without a wire format.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;

/// The name that stands for all resources of a type.
pub(super) const ALL: &str = "*";

/// The name, which no resource can be held by, of what stands in for all resources of a type that
/// were rejected and have no place: they cannot be named, or are beyond the limits.
pub const UNPLACED: &str = "";

/// A type of resource, and how much of it is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subscription {
    /// As `type.googleapis.com/istio.workload.Address`; the body of each resource has it too.
    pub type_url: &'static str,
    /// Everything, or what is asked for.
    pub mode: Mode,
}

/// How much of a type is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// All resources of the type.
    Wildcard,
    /// Those that [`Client::want`](super::Client::want) named.
    OnDemand,
}

/// What the server is told: a `DeltaDiscoveryRequest` but for the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// The type that it is about. Borrowed for the types that we subscribed to; an answer to a
    /// response of another type has that response's own.
    pub type_url: Cow<'static, str>,
    /// The nonce of the response that this answers; empty: it answers none.
    pub nonce: String,
    /// Names wanted from now on. Empty in the first request of a stream: all of them.
    pub subscribe: Vec<String>,
    /// Names not wanted any more.
    pub unsubscribe: Vec<String>,
    /// In the first request of a stream: what is held, by name, in which version. The empty version
    /// is a name that is wanted and not held.
    pub initial_versions: BTreeMap<String, String>,
    /// Of a NACK: every rejected resource and why, at most 4 KiB.
    pub error: Option<String>,
    /// Whether the node goes with it: in the first request of each type on a stream.
    pub with_node: bool,
}

impl Request {
    /// The answer to a response: an ACK, or with an error a NACK.
    pub(super) fn answer(
        type_url: Cow<'static, str>,
        nonce: String,
        error: Option<String>,
    ) -> Self {
        Self {
            type_url,
            nonce,
            error,
            ..Self::default()
        }
    }

    /// A change of the subscription: it never answers, because a server takes names in an answer
    /// for an error (contract 3.1).
    pub(super) fn change(
        type_url: &'static str,
        subscribe: Vec<String>,
        unsubscribe: Vec<String>,
    ) -> Self {
        Self {
            type_url: Cow::Borrowed(type_url),
            subscribe,
            unsubscribe,
            ..Self::default()
        }
    }
}

/// A resource as the server sent it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resource {
    /// Unique within its type. Shared with whoever keeps it.
    pub name: Arc<str>,
    /// The server's word for this state of it. It means nothing to us.
    pub version: Arc<str>,
    /// Not decoded yet; `None` if the message had no body.
    pub body: Option<Bytes>,
    /// The type URL of the body.
    pub body_type: String,
}

/// What the server says: a `DeltaDiscoveryResponse`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Response {
    /// The type that it is about.
    pub type_url: String,
    /// What the answer has to carry.
    pub nonce: String,
    /// New resources and new versions of old ones.
    pub resources: Vec<Resource>,
    /// Names of resources that are gone.
    pub removed: Vec<String>,
}

/// Where accepted resources go: it decodes them, and says which it cannot use.
pub trait Resources {
    /// Takes a new resource, or a new version of one.
    ///
    /// # Errors
    /// Why it is rejected, for the server and for people. Nothing has changed then, and the version
    /// that was taken before stays in force.
    fn upsert(&mut self, type_url: &'static str, resource: &Resource) -> Result<(), String>;

    /// A resource was rejected, by us or by `upsert`, and nothing of it is held. Says whether
    /// something stands in for it all the same. It is then held without a version: the server has
    /// to send it again or to say that it is gone, and `remove` will be called.
    ///
    /// What cannot be held has the name [`UNPLACED`], which may come more than once. It counts
    /// against no limit, and `remove` is called when the first response of a stream has none.
    fn rejected(&mut self, type_url: &'static str, name: &str) -> bool;

    /// Returns whether anybody reads the bodies of a type. Those that nobody reads are not
    /// compared, and do not count against the limits.
    fn reads(&self, _type_url: &str) -> bool {
        true
    }

    /// Returns whether a response names every resource of its type, so that what is held and not
    /// named is gone.
    fn is_whole(&self, _type_url: &str, _response: &Response) -> bool {
        false
    }

    /// A resource that was taken before is gone, or one that something stands in for.
    fn remove(&mut self, type_url: &'static str, name: &str);
}
