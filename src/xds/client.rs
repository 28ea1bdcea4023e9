//! What a discovery client hands over: resources as they came, and where they go.

use bytes::Bytes;

/// A resource as it came.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resource {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Other names under which it was asked for.
    pub aliases: Vec<String>,
    /// The message, if there is one.
    pub body: Option<Bytes>,
    /// The type of the message, as a URL.
    pub body_type: String,
}

/// Where resources are decoded and kept.
pub trait Resources {
    /// Takes a resource that is new or has changed. An error says which field is wrong and how;
    /// the last good version stays then.
    fn upsert(&mut self, type_url: &'static str, resource: &Resource) -> Result<(), String>;

    /// Drops a resource.
    fn remove(&mut self, type_url: &'static str, name: &str);
}
