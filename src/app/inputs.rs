//! Files that a start needs: loaded and checked together, and converted into snapshot types.

use std::mem;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::Context;

use crate::config::{
    Config, Discovery, Examined, Identity, IdentityFiles, IstioCa, Source, parse_identity,
};
use crate::grpc::channel;
use crate::snapshot::builder::Change;
use crate::snapshot::mesh::Mesh;
use crate::snapshot::{Policies, ServiceVisibility};
use crate::tls::{self, IdentityMaterial, PeerTrust, TlsError};
use crate::xds;
use crate::xds::objects::{self, AddressHolders, JoinResult, Objects};
use crate::yaml::{Findings, Severity};

use super::trust::Certificates;
use super::{compare, traffic, trust};

/// Permission bits of users who are neither the owner nor in the group of the file.
const OTHER_USERS_MODE: u32 = 0o007;

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
    /// Holders of the addresses of objects by the last join.
    pub(super) holders: Arc<AddressHolders>,
}

/// Content of all files.
#[derive(Debug)]
pub struct Inputs {
    /// Configuration with the entries of objects.
    pub config: Config,
    /// Configuration without them.
    pub(super) own_config: Config,
    /// Mesh.
    pub mesh: Mesh,
    /// Exported services, services that stay local, and linked clusters.
    pub scope: ServiceVisibility,
    /// Content of the mesh's files before the join with the configuration, including
    /// authorization policies.
    pub(super) mesh_files: MeshFiles,
    /// Own certificate, key and roots, if they are in files.
    pub material: Option<IdentityMaterial>,
    /// Trust domains, roots and revocation lists that peers are verified against.
    pub trust: PeerTrust,
    /// Warnings about settings that are allowed.
    pub warnings: Vec<String>,
    /// Mistakes in objects that are skipped.
    pub(super) skipped_objects: Vec<String>,
    /// Claims of objects that have no effect because of other claims.
    pub(super) conflicts: Vec<String>,
}

/// Findings of `strait check`.
#[derive(Debug, Default)]
pub struct Report {
    /// Mistakes, one line each.
    pub errors: Vec<String>,
    /// Mistakes in objects, one line each. The objects are skipped, and the rest is used.
    pub skipped_objects: Vec<String>,
    /// Warnings, one line each.
    pub warnings: Vec<String>,
    /// Warning that certificates, keys or tokens do not exist here; `warnings` contains it too.
    pub absent: Option<String>,
    /// Content of the files, if every file could be read.
    pub inputs: Option<Inputs>,
}

impl Inputs {
    /// Loads every file that the configuration names.
    ///
    /// # Errors
    /// All mistakes, one line each.
    pub(super) fn load(source: &Source, examined: Examined) -> anyhow::Result<Self> {
        let mut report = load_and_check(source, examined);
        let inputs = report.inputs.take();
        report.to_result()?;
        inputs.context("not every file could be read")
    }

    /// Returns the first change of the snapshot after the start.
    pub(super) fn change(&self) -> Change {
        Change {
            mesh: Some((self.mesh.clone(), self.config.gateway.network.as_str().into())),
            trust: Some(trust::set(&self.config, &self.trust)),
            policies: self.received_policies(),
            scope: Some(self.scope.clone()),
            position: Some(traffic::position(&self.config, None)),
            ..Change::of(&self.config)
        }
    }

    /// Returns the policies, if the source has provided them by now.
    pub(super) fn received_policies(&self) -> Option<Policies> {
        match self.config.discovery {
            Discovery::File { .. } => Some(self.mesh_files.policies.clone()),
            // An Envoy control plane has none.
            Discovery::Envoy { .. } => Some(Policies::default()),
            Discovery::Istio { .. } => None,
        }
    }
}

/// Reads everything and reports the mistakes of all files together. A mistake in one file hides
/// none in the others, if the key that names them can be read.
pub(super) fn load_and_check(source: &Source, examined: Examined) -> Report {
    let mut report = Report::from_findings(&examined.findings);
    let mesh = match &examined.discovery {
        Some(Discovery::File { path }) => {
            let loaded = report.record_errors(xds::file::load(path));
            loaded.inspect(|(_, findings)| report.note(findings))
        }
        // Discovery provides it at run time.
        Some(Discovery::Istio { .. } | Discovery::Envoy { .. }) => {
            let nothing = (Mesh::default(), Policies::default());
            Some((nothing, Findings::default()))
        }
        None => None,
    };
    let objects = report.load_objects(&examined.objects);
    let certificates = report.load_certificates(source, &examined);
    report.check_control_planes(source.path(), &examined);
    report.check_own_domain(&examined, certificates.as_ref());
    let own_issuer = trust::own_issuer(&examined, certificates.as_ref());
    report.warnings.extend(own_issuer);
    let revocation = trust::revocation_warnings(source.path(), &examined, certificates.as_ref());
    if let (Some(config), Some(mesh), Some(objects), Some((material, trust))) =
        (examined.config, mesh, objects, certificates)
    {
        let ((mesh, policies), mesh_findings) = mesh;
        let (objects, object_findings) = objects;
        let mut mesh_files = MeshFiles {
            mesh,
            policies,
            mesh_findings,
            objects,
            object_findings,
            ..MeshFiles::default()
        };
        let own_config = config;
        let (config, joined) = report.join(&own_config, &mut mesh_files);
        let (warnings, passed_over) = (report.warnings.clone(), report.skipped_objects.clone());
        report.inputs = Some(Inputs {
            config,
            own_config,
            mesh: joined.mesh,
            scope: joined.scope,
            mesh_files,
            material,
            trust,
            warnings,
            skipped_objects: passed_over,
            conflicts: joined.conflicts.lines(),
        });
    }
    report.warnings.extend(revocation);
    report
}

impl Report {
    /// Creates a report of the findings about the configuration itself.
    pub(super) fn from_findings(findings: &Findings) -> Self {
        let mut report = Self::default();
        report.note(findings);
        report
    }

    pub(super) fn note(&mut self, findings: &Findings) {
        for finding in &findings.0 {
            let lines = match finding.severity {
                Severity::Error | Severity::Absent => &mut self.errors,
                Severity::PassedOver => &mut self.skipped_objects,
                Severity::Warning => &mut self.warnings,
            };
            lines.push(finding.to_string());
        }
    }

    /// Fails if there are mistakes.
    ///
    /// # Errors
    /// All mistakes, one line each.
    pub(super) fn to_result(&self) -> anyhow::Result<()> {
        if self.errors.is_empty() {
            Ok(())
        } else {
            Err(anyhow::Error::msg(self.errors.join("\n")))
        }
    }

    fn record_errors<T, E: ToString>(&mut self, result: Result<T, E>) -> Option<T> {
        result.map_err(|error| self.errors.extend(error.to_string().lines().map(Into::into))).ok()
    }

    /// Loads the Kubernetes objects.
    pub(super) fn load_objects(&mut self, paths: &[PathBuf]) -> Option<(Objects, Findings)> {
        let loaded = self.record_errors(objects::load(paths));
        loaded.inspect(|(_, findings)| self.note(findings))
    }

    /// Returns the configuration with the entries of objects, and the joined files under it. Under
    /// a control plane, which provides the services and endpoints itself, objects add none.
    pub(super) fn join(&mut self, config: &Config, files: &mut MeshFiles) -> (Config, JoinResult) {
        let (mut config, findings) = objects::merge(config, &files.objects, &files.mesh);
        self.note(&findings);
        let mut joined = objects::join(&files.mesh, &files.objects, &config, &files.holders);
        files.holders = Arc::new(mem::take(&mut joined.holders));
        let is_of_file = matches!(config.discovery, Discovery::File { .. });
        if !is_of_file {
            (joined.mesh, joined.conflicts) = (files.mesh.clone(), Findings::default());
        }
        let of_file = is_of_file.then_some(&joined.mesh);
        self.note(&objects::distribute(&mut config, &files.objects, of_file));
        self.warnings.extend(joined.conflicts.lines());
        self.warnings.extend(joined.warnings.lines());
        let compared = compare::run(&config, &joined.mesh, &joined.scope, &files.policies);
        self.warnings.extend(compared);
        (config, joined)
    }

    /// Loads the certificates and checks that they match. Certificates from an authority are not
    /// requested: a machine that only checks may have no token.
    fn load_certificates(&mut self, source: &Source, examined: &Examined) -> Option<Certificates> {
        let path = source.path();
        let trust = self.load_trust(path, examined);
        let files = match examined.identity.as_ref()? {
            Identity::Files(files) => files,
            Identity::IstioCa(ca) => {
                self.check_identity(source, examined.config.as_ref()?, ca);
                return Some((None, trust?));
            }
            Identity::Spiffe { .. } => return Some((None, trust?)),
        };
        let own = [&files.chain, &files.key, &files.roots];
        if own.into_iter().any(|file| examined.is_absent(file)) {
            return Some((None, trust?));
        }
        let located = |error: TlsError| located(&error, path, Some(files), examined);
        let material = self.record_errors(IdentityMaterial::load(files).map_err(located))?;
        self.check_key_permissions(path, &files.key, examined);
        // The gateway's own files can be checked without the domains.
        let nothing = PeerTrust::default();
        let effective_trust = trust.as_ref().unwrap_or(&nothing);
        let verified = material.verify(effective_trust.crls.as_deref(), SystemTime::now());
        let served = verified.and_then(|_| tls::listener_server_config(&material, effective_trust));
        self.record_errors(served.map_err(located))?;
        Some((Some(material), trust?))
    }

    /// Reads the roots and tokens of the connections to control planes, each file once.
    fn check_control_planes(&mut self, path: &Path, examined: &Examined) {
        let authority = match &examined.identity {
            Some(Identity::IstioCa(ca)) => Some(&ca.plane),
            _ => None,
        };
        let source = match &examined.discovery {
            Some(Discovery::Istio { plane, .. } | Discovery::Envoy { plane, .. }) => Some(plane),
            _ => None,
        };
        let planes = authority.into_iter().chain(source);
        let wrong = planes.flat_map(channel::check_files);
        for (file, error) in wrong.filter(|(file, _)| !examined.is_absent(file)) {
            let place = examined.place_of(&file, path);
            let line = format!("{place}: error: {error}; write the path of a file with one");
            if !self.errors.contains(&line) {
                self.errors.push(line);
            }
        }
    }

    /// Warns if the trust domains do not include the gateway's own, which is rarely intended.
    fn check_own_domain(&mut self, examined: &Examined, certificates: Option<&Certificates>) {
        let material = certificates.and_then(|(material, _)| material.as_ref());
        let own = match &examined.identity {
            Some(Identity::IstioCa(ca)) => Some(&*ca.trust_domain),
            _ => material.map(|material| &*material.identity.trust_domain),
        };
        let (Some(own), Some(trust)) = (own, &examined.trust) else {
            return;
        };
        if !trust.skip_validation && trust.domains.iter().all(|domain| domain.name != own) {
            let place = examined.trust_place.as_ref();
            let place = place.map_or_else(String::new, |place| format!("{place}: "));
            self.warnings.push(format!(
                "{place}warning: the gateway's certificate is of {}, which is not in \
                 trust.domains; peers of the gateway's own cluster are refused",
                own.escape_debug()
            ));
        }
    }

    /// Rejects an invalid identity for certificate requests: the environment may contain only a
    /// part.
    fn check_identity(&mut self, source: &Source, config: &Config, ca: &IstioCa) {
        let id = source.who(config).identity(&ca.trust_domain);
        for (configured, key, variable) in [
            (&ca.namespace, "namespace", "POD_NAMESPACE"),
            (&ca.service_account, "service_account", "SERVICE_ACCOUNT"),
        ] {
            if configured.is_none() && !source.environment().says(variable) {
                self.warnings.push(format!(
                    "{}: warning: neither `identity.{key}` nor {variable} is set: a certificate is \
                     requested for {id}; write the one that the token belongs to",
                    config.file.display()
                ));
            }
        }
        if parse_identity(&id).is_none() {
            self.errors.push(format!(
                "{}: error: {id:?} is not a workload identity; write `identity.namespace` and \
                 `identity.service_account`, or set POD_NAMESPACE and SERVICE_ACCOUNT",
                config.file.display()
            ));
        }
    }

    /// Loads the trust domains with their roots, the issuers and the revocation lists. Domains,
    /// issuers and lists whose files do not exist are omitted; the findings contain them.
    pub(super) fn load_trust(&mut self, path: &Path, examined: &Examined) -> Option<PeerTrust> {
        let mut trust = examined.trust.clone()?;
        trust.domains.retain(|domain| {
            let mut roots = domain.roots.iter();
            !roots.any(|file| examined.is_absent(file))
        });
        for issuers in trust.issuer_lists() {
            let is_absent = |file: &PathBuf| examined.is_absent(file);
            issuers.retain(|issuer| !issuer.file().is_some_and(is_absent));
        }
        if let Some(crl) = &mut trust.crl {
            crl.files.retain(|file| !examined.is_absent(file));
        }
        let loaded = PeerTrust::load(&trust);
        self.record_errors(loaded.map_err(|error| located(&error, path, None, examined)))
    }

    /// Warns of a private key that every user of the machine may read or write.
    fn check_key_permissions(&mut self, path: &Path, key: &Path, examined: &Examined) {
        let mode = key.metadata().map_or(0, |metadata| metadata.mode());
        if mode & OTHER_USERS_MODE == 0 {
            return;
        }
        self.warnings.push(format!(
            "{}: warning: private key {} is accessible to every user (mode {:04o}); run `chmod \
             o-rwx`",
            examined.place_of(key, path),
            key.display(),
            mode & 0o7777
        ));
    }
}

/// Formats a mistake in a certificate file with the place that names the file, such as a line of
/// `path`.
fn located(
    error: &TlsError,
    path: &Path,
    own: Option<&IdentityFiles>,
    examined: &Examined,
) -> String {
    let (file, names_file) = match error {
        TlsError::Pem { file, .. }
        | TlsError::BadRoot { file, .. }
        | TlsError::BadLeaf { file, .. }
        | TlsError::BadCrl { file, .. }
        | TlsError::NoCertificate(file)
        | TlsError::NotAnIssuer(file)
        | TlsError::Refused { file, .. }
        | TlsError::NotARoot { file, .. }
        | TlsError::EncryptedKey(file) => (Some(file), true),
        TlsError::KeyMismatch(_) | TlsError::UnusableKey(_) => (own.map(|own| &own.key), false),
        TlsError::SharedIssuer { .. } => (None, true),
        TlsError::Verifier(_) | TlsError::Provider(_) => (own.map(|own| &own.roots), false),
    };
    let place = examined.place_of(file.map_or(path, PathBuf::as_path), path);
    let at = format!("{place}: error: ");
    match file {
        Some(file) if !names_file => format!("{at}{}: {error}", file.display()),
        _ => format!("{at}{error}"),
    }
}
