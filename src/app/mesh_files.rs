//! Mesh data from files: the mesh file, the Kubernetes objects, and both joined under a
//! configuration.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::config::{Config, Discovery};
use crate::snapshot::mesh::Mesh;
use crate::snapshot::{Policies, ServiceVisibility};
use crate::wire::sni::SniPattern;
use crate::xds::objects::{AddressHolders, Objects, distribute, join};
use crate::yaml::Findings;

use super::compare;

/// Content of the mesh file and of the files of objects.
#[derive(Clone, Debug, Default)]
pub(super) struct MeshFiles {
    /// Mesh of the mesh file; empty if a control plane provides the mesh.
    pub(super) mesh: Mesh,
    /// Policies of the mesh file.
    pub(super) policies: Policies,
    /// Findings about the mesh file.
    pub(super) mesh_findings: Findings,
    /// Kubernetes objects.
    pub(super) objects: Objects,
    /// Findings about the objects.
    pub(super) object_findings: Findings,
    /// Holders of the addresses of objects by the last join that was published.
    pub(super) holders: Arc<AddressHolders>,
}

/// Result of joining that content under a configuration.
#[derive(Debug)]
pub(super) struct Joined {
    /// Mesh of the file and of the objects. Empty under a control plane, whose mesh has its own
    /// services and endpoints.
    pub(super) mesh: Mesh,
    /// Exported services, services that stay local, and linked clusters.
    pub(super) scope: ServiceVisibility,
    /// Warnings, including the conflicts and those of [`compare`], one line each.
    pub(super) warnings: Vec<String>,
    /// Claims of objects that have no effect because of other claims, one line each.
    pub(super) conflicts: Vec<String>,
    /// Findings about the distributions of objects.
    pub(super) distributed: Findings,
    /// Holders of the addresses of objects.
    pub(super) holders: Arc<AddressHolders>,
}

impl MeshFiles {
    /// Joins mesh and objects under a configuration, and adds the distributions of objects to it.
    pub(super) fn join(&self, config: &mut Config) -> Joined {
        let joined = join(&self.mesh, &self.objects, config, &self.holders);
        let lines = |findings: Findings| findings.0.iter().map(ToString::to_string).collect();
        let (mesh, conflicts): (_, Vec<_>) = match config.discovery {
            Discovery::File { .. } => (joined.mesh, lines(joined.conflicts)),
            // A control plane provides the endpoints and addresses itself.
            Discovery::Istio { .. } | Discovery::Envoy { .. } => (self.mesh.clone(), Vec::new()),
        };
        let scope = ServiceVisibility {
            exported: joined.exported,
            local: joined.local,
            linked: linked_clusters(config),
            by_link: exposed_by_links(config),
        };
        let of_file = matches!(config.discovery, Discovery::File { .. }).then_some(&mesh);
        let distributed = distribute(config, &self.objects, of_file);
        let compared = compare::run(config, &mesh, &scope, &self.policies);
        Joined {
            mesh,
            scope,
            warnings: [conflicts.clone(), lines(joined.warnings), compared].concat(),
            conflicts,
            distributed,
            holders: Arc::new(joined.holders),
        }
    }
}

/// Returns the clusters whose peers are permitted: this one and those with a link to it. None
/// without `links`, which permits all.
fn linked_clusters(config: &Config) -> Option<HashSet<Box<str>>> {
    let own = config.gateway.cluster.as_str();
    let links = config.links.as_ref()?.iter();
    let here = links.filter(|link| link.to == own).map(|link| link.from.as_str());
    Some(here.chain([own]).map(Into::into).collect())
}

/// Returns the services that links to this cluster expose, by the cluster of the peers.
fn exposed_by_links(config: &Config) -> HashMap<Box<str>, Vec<SniPattern>> {
    let links = config.links.iter().flatten();
    let here = links.filter(|link| link.to == config.gateway.cluster && !link.exposes.is_empty());
    here.map(|link| (link.from.as_str().into(), link.exposes.clone())).collect()
}
