//! Inputs and outputs of the client: plain structs without a wire format.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;

/// Wildcard name for all resources of a type.
pub(super) const WILDCARD: &str = "*";

/// Name of the shared placeholder for all rejected resources of a type that cannot be held:
/// they have no usable name or exceed the limits. No resource can have this name.
pub const SHARED_PLACEHOLDER: &str = "";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subscription {
    /// Type URL, such as `type.googleapis.com/istio.workload.Address`. The body of each
    /// resource has the same type.
    pub type_url: &'static str,
    /// Subscription to all resources or to named ones.
    pub mode: Mode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Wildcard,
    /// Resources that [`Client::set_wanted`](super::Client::set_wanted) names.
    OnDemand,
}

/// Request to the server: a `DeltaDiscoveryRequest` without the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Type URL. Borrowed for subscribed types; the answer to a response of another type owns
    /// that response's type.
    pub type_url: Cow<'static, str>,
    /// Nonce of the response that this request answers; empty if it answers none.
    pub nonce: String,
    /// Names to subscribe to. Empty in the first request of a stream for all resources.
    pub subscribe: Vec<String>,
    pub unsubscribe: Vec<String>,
    /// Held versions by name, in the first request of a stream. An empty version marks a name
    /// that is wanted and not held.
    pub initial_versions: BTreeMap<String, String>,
    /// Message of a NACK: every rejected resource and the reason, at most 4 KiB.
    pub error: Option<String>,
    /// True if the request carries the node: in the first request of each type on a stream.
    pub with_node: bool,
}

/// Resource as received from the server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resource {
    /// Name, unique within its type. Shared with the stores that keep it.
    pub name: Arc<str>,
    /// Version, shared with other resources of the message, as is the type of the body.
    pub version: Arc<str>,
    /// Encoded body; `None` if the message had none.
    pub body: Option<Bytes>,
    pub body_type: Arc<str>,
}

/// Response of the server: a `DeltaDiscoveryResponse`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Response {
    pub type_url: String,
    pub nonce: String,
    /// New resources and new versions of known ones.
    pub resources: Vec<Resource>,
    pub removed: Vec<String>,
}

#[derive(Clone, Copy, Debug)]
pub struct Removals<'a> {
    /// True for the first response of the type on a stream.
    pub is_first: bool,
    /// Number of resources of the type that are held before the response.
    pub held: usize,
    pub held_of_all: usize,
    /// Names of the held resources that the response removes.
    pub gone: &'a [Arc<str>],
    /// Resources that it sends and that are not held, if it removes any.
    pub added: &'a [&'a Resource],
}

/// Store of accepted resources. It decodes them and rejects those that it cannot use.
pub trait ResourceStore {
    /// Stores a new resource, or a new version of one.
    ///
    /// # Errors
    /// The reason for the rejection, sent to the server and shown in the status. The store is
    /// then unchanged, and the previous version stays in force.
    fn upsert(&mut self, type_url: &'static str, resource: &Resource) -> Result<(), String>;

    /// Announces resources of a type that [`Self::upsert`] gets next, in this order, unless the
    /// client rejects them. An empty list follows the last of them.
    fn announce_upserts(&mut self, _type_url: &'static str, _resources: &[&Resource]) {}

    /// Handles the rejection of a resource, by the client or by `upsert`, if no version of it
    /// is held. Returns whether the store keeps a placeholder for it. The client holds a
    /// placeholder without a version, so that the server has to send the resource again or
    /// remove it. A valid version replaces the placeholder by `upsert`, and a removal calls
    /// `remove`.
    ///
    /// Rejected resources that cannot be held share the name [`SHARED_PLACEHOLDER`], which may be
    /// passed more than once. Their placeholder counts against no limit. `remove` is called when
    /// the first response of a stream has no such resource.
    fn handle_rejection(&mut self, type_url: &'static str, name: &str) -> bool;

    /// Returns whether the bodies of a type are used. Unused bodies are not compared and do not
    /// count against the limits.
    fn uses_bodies(&self, _type_url: &str) -> bool {
        true
    }

    /// Returns whether a response names every resource of its type, so that held resources
    /// without mention are gone.
    fn is_complete_state(&self, _type_url: &str, _response: &Response) -> bool {
        false
    }

    /// Announces the removals of a response before they are made. `gone` has the names of held
    /// resources.
    fn announce(&mut self, _type_url: &'static str, _removals: &Removals<'_>) {}

    /// Removes a stored resource or a placeholder.
    fn remove(&mut self, type_url: &'static str, name: &str);
}
