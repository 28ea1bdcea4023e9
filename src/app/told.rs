//! What files say of the mesh: the mesh file and Kubernetes' objects, and what becomes of both by
//! the configuration.

use std::collections::HashSet;

use crate::config::{Config, Discovery};
use crate::snapshot::mesh::Mesh;
use crate::snapshot::{Policies, Scope};
use crate::xds::objects::{Objects, join};
use crate::yaml::Findings;

/// Content of the mesh file and of the files of objects.
#[derive(Clone, Debug, Default)]
pub(super) struct Told {
    /// The mesh of the mesh file; an empty one where a control plane tells it.
    pub(super) mesh: Mesh,
    /// The policies of the mesh file.
    pub(super) policies: Policies,
    /// The objects.
    pub(super) objects: Objects,
}

/// Result of joining that content under a configuration.
#[derive(Debug)]
pub(super) struct Joined {
    /// The mesh of the file and of the objects. Under a control plane, whose mesh has its own
    /// services and endpoints, it is empty.
    pub(super) mesh: Mesh,
    /// Exported services, services that stay local, and linked clusters.
    pub(super) scope: Scope,
    /// Warnings, a line each, including the conflicts.
    pub(super) warnings: Vec<String>,
    /// Claims of objects that other claims keep from having effect, a line each.
    pub(super) conflicts: Vec<String>,
}

impl Told {
    /// Joins all of it.
    pub(super) fn joined(&self, config: &Config) -> Joined {
        let joined = join(&self.mesh, &self.objects, config);
        let lines = |findings: Findings| findings.0.iter().map(ToString::to_string).collect();
        let (mesh, conflicts): (_, Vec<_>) = match config.discovery {
            Discovery::File { .. } => (joined.mesh, lines(joined.conflicts)),
            // A control plane's endpoints and addresses are its own.
            Discovery::Istio { .. } | Discovery::Envoy { .. } => (self.mesh.clone(), Vec::new()),
        };
        Joined {
            mesh,
            scope: Scope {
                exported: joined.exported,
                local: joined.local,
                linked: linked(config),
            },
            warnings: [conflicts.clone(), lines(joined.warnings)].concat(),
            conflicts,
        }
    }
}

/// The clusters whose peers may come: where there are links, those with one to us, and our own.
fn linked(config: &Config) -> Option<HashSet<Box<str>>> {
    let own = config.gateway.cluster.as_str();
    let links = config.links.as_ref()?.iter();
    let here = links
        .filter(|link| link.to == own)
        .map(|link| link.from.as_str());
    Some(here.chain([own]).map(Into::into).collect())
}
