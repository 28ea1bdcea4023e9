//! Object of the API server as its text.
//!
//! Objects come in pages, and a page of which one object cannot be parsed is an error as a whole.
//! The text of an object is parsed apart, so that such an object is invalid alone: a tenant can
//! store one that nests deeper than serde_json reads, where a schema preserves unknown fields.
//!
//! The type of a watch event precedes its object, in the order of `metav1.WatchEvent`. In another
//! order the event is an error, and the kind is listed again.

use std::borrow::Cow;
use std::collections::BTreeMap;

use kube::Resource;
use kube::api::{ApiResource, ObjectMeta};
use kube::core::DynamicResourceScope;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value as Json, json};

/// Object of any kind.
#[derive(Clone, Debug)]
pub(super) struct TextObject {
    text: Box<RawValue>,
    metadata: Metadata,
    /// Part of the metadata that a watch reads.
    meta: ObjectMeta,
}

/// Metadata by which an object is known. Others, such as `managedFields`, nest as the object does.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
struct Metadata {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    generation: Option<i64>,
    creation_timestamp: Option<String>,
    labels: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for TextObject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Head {
            #[serde(default)]
            metadata: Metadata,
        }
        let text = Box::<RawValue>::deserialize(deserializer)?;
        let Head { metadata } =
            serde_json::from_str(text.get()).map_err(serde::de::Error::custom)?;
        let meta = ObjectMeta {
            name: metadata.name.clone(),
            namespace: metadata.namespace.clone(),
            resource_version: metadata.resource_version.clone(),
            ..ObjectMeta::default()
        };
        Ok(Self { text, metadata, meta })
    }
}

impl TextObject {
    /// Returns the object, with the type that items of a list do not have. One that cannot be
    /// parsed has the reason in place of its annotations, which is an error for every kind, and of
    /// its content.
    pub(super) fn json(&self, resource: &ApiResource) -> Json {
        let parsed = serde_json::from_str(self.text.get());
        let mut json = parsed.unwrap_or_else(|error: serde_json::Error| {
            let why = format!("cannot be parsed: {error}");
            let mut metadata = json!(self.metadata);
            metadata["annotations"] = why.as_str().into();
            json!({"metadata": metadata, "spec": why})
        });
        if let Some(fields) = json.as_object_mut() {
            fields.insert("apiVersion".to_owned(), resource.api_version.as_str().into());
            fields.insert("kind".to_owned(), resource.kind.as_str().into());
        }
        json
    }
}

impl Resource for TextObject {
    type DynamicType = ApiResource;
    type Scope = DynamicResourceScope;

    fn kind(resource: &ApiResource) -> Cow<'_, str> {
        resource.kind.as_str().into()
    }

    fn group(resource: &ApiResource) -> Cow<'_, str> {
        resource.group.as_str().into()
    }

    fn version(resource: &ApiResource) -> Cow<'_, str> {
        resource.version.as_str().into()
    }

    fn plural(resource: &ApiResource) -> Cow<'_, str> {
        resource.plural.as_str().into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.meta
    }
}
