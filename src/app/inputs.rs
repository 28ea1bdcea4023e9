//! The files that a start needs, loaded and checked together, and turned into snapshot types.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tracing::{info, warn};

use crate::config::{
    Config, DefaultExposure, Discovery, Examined, Identity, IdentityFiles, Severity,
};
use crate::snapshot::mesh::Mesh;
use crate::snapshot::{Audience, Exposure, ExposureTable, TrustSet};
use crate::tls::{self, Material, TlsError, TrustedDomain};
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

/// Reads everything and reports all mistakes of all files at once: a mistake in one file hides
/// none in the others, as long as the key that names them can be read.
pub fn check(path: &Path) -> Report {
    let mut report = Report::default();
    let examined = Config::examine(path);
    for finding in &examined.findings.0 {
        match finding.severity {
            Severity::Error => report.errors.push(finding.to_string()),
            Severity::Warning => report.warnings.push(finding.to_string()),
        }
    }
    let mesh = examined.discovery.as_ref().and_then(|discovery| {
        let Discovery::File { path } = discovery;
        Some((report.keep(xds::file::load(path))?, path))
    });
    let certificates = report.certificates(path, &examined);
    if let (Some(config), Some((mesh, mesh_path)), Some((material, domains))) =
        (examined.config, mesh, certificates)
    {
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

    /// Loads the certificates, and tries whether they fit together.
    fn certificates(
        &mut self,
        path: &Path,
        examined: &Examined,
    ) -> Option<(Material, Vec<TrustedDomain>)> {
        let files = examined.identity.as_ref();
        let files = files.map(|Identity::Files(files)| files);
        let located = |error: TlsError| located(&error, path, files, &examined.named);
        let domains = examined
            .trust
            .as_ref()
            .and_then(|trust| self.keep(TrustedDomain::load_all(&trust.domains).map_err(located)));
        let material = files.and_then(|files| self.keep(Material::load(files).map_err(located)))?;
        // Our own files can be judged without the domains.
        let judged = domains.as_deref().unwrap_or_default();
        self.keep(tls::server_config(&material, judged).map_err(located))?;
        Some((material, domains?))
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

/// A mistake in a certificate's file, at the line of `path` that names the file.
fn located(
    error: &TlsError,
    path: &Path,
    own: Option<&IdentityFiles>,
    named: &[(PathBuf, u64)],
) -> String {
    let (file, is_said) = match error {
        TlsError::Pem { file, .. }
        | TlsError::BadRoot { file, .. }
        | TlsError::BadLeaf { file, .. }
        | TlsError::NoCertificate(file)
        | TlsError::Expired(file) => (Some(file), true),
        TlsError::KeyMismatch(_) => (own.map(|own| &own.key), false),
        TlsError::Verifier(_) | TlsError::Provider(_) => (own.map(|own| &own.roots), false),
    };
    let line = named.iter().find(|(named, _)| Some(named) == file);
    let line = line.map_or(1, |(_, line)| *line);
    let at = format!("{}:{line}: error: ", path.display());
    match file {
        Some(file) if !is_said => format!("{at}{}: {error}", file.display()),
        _ => format!("{at}{error}"),
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
