//! The files that a start needs, loaded and checked together, and turned into snapshot types.

use std::path::Path;
use std::sync::Arc;

use tracing::{info, warn};

use crate::config::{Config, DefaultExposure, Discovery, Identity, Severity};
use crate::snapshot::mesh::Mesh;
use crate::snapshot::{Audience, Exposure, ExposureTable, TrustSet};
use crate::tls::{self, Material, TrustedDomain};
use crate::xds;

/// Everything that the files say.
#[derive(Debug)]
pub struct Inputs {
    /// The configuration.
    pub config: Config,
    /// The mesh.
    pub mesh: Mesh,
    /// Our certificate, key and roots.
    pub material: Material,
    /// The trust domains with the roots of their own.
    pub domains: Vec<TrustedDomain>,
    /// What is allowed, but worth a look.
    pub warnings: Vec<String>,
}

/// What `strait check` found.
#[derive(Debug, Default)]
pub struct Report {
    /// Mistakes, each a line.
    pub errors: Vec<String>,
    /// Warnings, each a line.
    pub warnings: Vec<String>,
    /// What was read, if every file could be.
    pub inputs: Option<Inputs>,
}

impl Inputs {
    /// Loads the configuration and every file that it names.
    ///
    /// # Errors
    /// All mistakes, a line each.
    pub fn load(path: &Path) -> anyhow::Result<Self> {
        let report = check(path);
        match report.inputs {
            Some(inputs) if report.errors.is_empty() => Ok(inputs),
            _ => Err(anyhow::Error::msg(report.errors.join("\n"))),
        }
    }

    /// The network whose endpoints are local.
    pub fn network(&self) -> Arc<str> {
        self.config.gateway.network.as_str().into()
    }

    /// Says in the log what was loaded, and what is worth a look.
    pub(super) fn announce(&self, version: u64) {
        for warning in &self.warnings {
            warn!("{warning}");
        }
        info!(
            identity = %self.material.identity.uri, cluster = self.config.gateway.cluster,
            services = self.mesh.services.len(), workloads = self.mesh.workloads.len(),
            version, "ready"
        );
    }
}

/// Reads everything and reports all mistakes of all files at once.
pub fn check(path: &Path) -> Report {
    let mut report = Report::default();
    let (config, findings) = Config::check(path);
    for finding in &findings.0 {
        match finding.severity {
            Severity::Error => report.errors.push(finding.to_string()),
            Severity::Warning => report.warnings.push(finding.to_string()),
        }
    }
    let Some(config) = config else { return report };
    let Discovery::File { path: mesh_path } = &config.discovery;
    let mesh = report.keep(xds::file::load(mesh_path));
    let Identity::Files(files) = &config.identity;
    let material = report.keep(Material::load(files));
    let domains = report.keep(TrustedDomain::load_all(&config.trust.domains));
    if let (Some(mesh), Some(material), Some(domains)) = (mesh, material, domains) {
        report.keep(tls::server_config(&material, &domains));
        report.compare(&config, &mesh, mesh_path);
        let warnings = report.warnings.clone();
        report.inputs = Some(Inputs {
            config,
            mesh,
            material,
            domains,
            warnings,
        });
    }
    report
}

impl Report {
    fn keep<T, E: ToString>(&mut self, result: Result<T, E>) -> Option<T> {
        result
            .map_err(|error| {
                self.errors
                    .extend(error.to_string().lines().map(Into::into))
            })
            .ok()
    }

    /// What only the two files together show.
    fn compare(&mut self, config: &Config, mesh: &Mesh, mesh_path: &Path) {
        let known = |host: &str| mesh.services.iter().any(|service| service.hostname == host);
        for exposed in &config.exposure.services {
            let at = format!("{}:{}", config.file.display(), exposed.line);
            let host = &exposed.service.host;
            if !known(host) {
                self.warnings.push(format!(
                    "{at}: warning: {host} is no service of {}; write the hostname of one",
                    mesh_path.display()
                ));
            }
            for name in exposed
                .names
                .iter()
                .filter(|name| name.host != *host && known(&name.host))
            {
                self.errors.push(format!(
                    "{at}: error: the name {} is that of another service; write a name that no \
                     service has",
                    name.host
                ));
            }
        }
        for service in mesh.services.iter().filter(|service| service.waypoint) {
            self.warnings.push(format!(
                "{}: warning: {} has a waypoint, which is not built yet: its tunnels are refused",
                mesh_path.display(),
                service.hostname
            ));
        }
        if mesh.policies > 0 {
            self.warnings.push(format!(
                "{}: warning: its {} authorization policies are not enforced at this gateway; \
                 who may reach what is said by `exposure`",
                mesh_path.display(),
                mesh.policies
            ));
        }
    }
}

/// The trust set that the configuration describes.
pub(super) fn trust_set(config: &Config) -> TrustSet {
    TrustSet::new(
        config
            .trust
            .domains
            .iter()
            .map(|d| (d.name.as_str(), d.cluster.as_str())),
    )
}

/// The exposure table that the configuration describes.
pub(super) fn exposure_table(config: &Config) -> ExposureTable {
    let mut table = ExposureTable::new(config.exposure.default == DefaultExposure::All);
    for entry in &config.exposure.services {
        let to = entry.to.iter().map(|audience| Audience {
            anyone: audience.anyone,
            cluster: audience.cluster.as_deref().map(Into::into),
            namespaces: audience
                .namespaces
                .iter()
                .map(|name| name.as_str().into())
                .collect(),
            service_accounts: audience
                .service_accounts
                .iter()
                .map(|(namespace, name)| (namespace.as_str().into(), name.as_str().into()))
                .collect(),
        });
        let exposure = Exposure {
            port: entry.service.port,
            to: to.collect(),
        };
        // A name without port has the service's.
        let names = entry.names.iter();
        let names = names.map(|name| (name.host.as_str(), name.port.or(exposure.port)));
        table.expose(&entry.service.host, &exposure, names);
    }
    table
}
