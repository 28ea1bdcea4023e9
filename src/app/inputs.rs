//! Contents of the files: read and checked together, and joined into the state that the gateway is
//! to have. The start, every reload and `strait check` use the same functions.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::{Context, ensure};

use crate::config::{
    Config, ControlPlane, Discovery, Examined, Identity, IdentityFiles, IstioCa, MeshFile, Source,
    parse_identity,
};
use crate::grpc::channel;
use crate::labels::join;
use crate::snapshot::builder::Change;
use crate::snapshot::mesh::Mesh;
use crate::snapshot::{Policies, ServiceVisibility};
use crate::tls::{self, IdentityMaterial, PeerTrust, TlsError};
use crate::xds;
use crate::xds::live::LiveObjects;
use crate::xds::objects::{self, AddressHolders, Objects};
use crate::yaml::{Finding, Findings, Place, Severity};

use super::{compare, trust};

/// Permission bits of users who are neither the owner nor in the group of the file.
const OTHER_USERS_MODE: u32 = 0o007;

/// Usable content of a source, and the findings that do not prevent its use.
type Loaded<T> = Arc<(T, Findings)>;

/// Last usable content of each source, before the join. Copies are cheap.
#[derive(Clone, Debug)]
pub(super) struct Files {
    /// Configuration without the entries of objects, with the values in force of the keys that need
    /// a restart.
    config: Loaded<Config>,
    /// Those of them that the file changes.
    pub(super) restart_only: Vec<&'static str>,
    /// Mesh file; empty if a control plane provides the mesh.
    pub(super) mesh: Loaded<(Mesh, Policies)>,
    pub(super) objects: Loaded<Objects>,
    /// Objects of an API server, once all kinds are listed.
    pub(super) live: Option<Arc<LiveObjects>>,
    /// Trust domains, roots and revocation lists that peers are verified against.
    pub(super) trust: Arc<PeerTrust>,
    /// Holders of the addresses of objects by the last join.
    holders: Arc<AddressHolders>,
}

/// Contents of all files, joined: the state that the gateway is to have.
#[derive(Debug)]
pub struct Inputs {
    pub config: Config,
    /// Mesh.
    pub mesh: Mesh,
    /// Exported services, services that stay local, and linked clusters.
    pub scope: ServiceVisibility,
    /// Contents before the join.
    pub(super) files: Files,
    /// Own certificate, key and roots, if they are in files and were read with the others.
    pub(super) own: Option<IdentityMaterial>,
    /// Mistakes in objects that are skipped, and warnings about settings that are allowed.
    pub(super) findings: Findings,
    /// Claims of objects that have no effect because of other claims.
    pub(super) conflicts: Vec<String>,
    /// Findings of the join about objects, which become the conditions of those of an API server.
    pub(super) of_live: Vec<Finding>,
}

/// Findings of `strait check`.
#[derive(Debug, Default)]
pub struct Report {
    /// The most severe first.
    pub findings: Findings,
    /// Warning that certificates, keys or tokens do not exist here; `findings` contains it too.
    pub absent: Option<Finding>,
    /// Contents of the files, if all that are joined could be read.
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

    /// Returns the parts of the snapshot that may differ from those under the configuration in
    /// force, which is none at the start. A control plane provides mesh and policies itself.
    pub(super) fn change(&self, in_force: Option<&Config>) -> Change {
        let is_of_file = self.config.discovery.is_of_objects();
        let network = self.config.gateway.network.as_str();
        let (_, policies) = &self.files.mesh.0;
        let of_config = match in_force {
            Some(in_force) if *in_force == self.config => Change::default(),
            _ => Change::of(&self.config),
        };
        Change {
            mesh: (is_of_file || in_force.is_none()).then(|| (self.mesh.clone(), network.into())),
            policies: is_of_file.then(|| policies.clone()),
            scope: Some(self.scope.clone()),
            trust: Some(trust::set(&self.config, &self.files.trust)),
            ..of_config
        }
    }
}

impl Files {
    /// Returns the configuration without the entries of objects.
    pub(super) fn config(&self) -> &Config {
        &self.config.0
    }

    /// Returns whether the join of both is the same.
    pub(super) fn are_joined_as(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.config, &other.config)
            && Arc::ptr_eq(&self.mesh, &other.mesh)
            && Arc::ptr_eq(&self.objects, &other.objects)
            && match (&self.live, &other.live) {
                (Some(live), Some(other)) => Arc::ptr_eq(live, other),
                (live, other) => live.is_none() && other.is_none(),
            }
    }

    /// Returns the contents under a changed configuration of the file `path`. Only the files of
    /// sections that differ are read.
    ///
    /// # Errors
    /// All mistakes in the configuration and in those files, one line each.
    pub(super) fn with_config(&self, path: &Path, examined: Examined) -> anyhow::Result<Self> {
        let old = self.config();
        let mut report = Report::of(&examined);
        let trust = match &examined.trust {
            Some(trust) if *trust == old.trust => Some(Arc::clone(&self.trust)),
            _ => report.load_trust(path, &examined),
        };
        let objects = if examined.objects == old.exposure.files {
            Some(Arc::clone(&self.objects))
        } else {
            report.load_objects(&examined.objects)
        };
        report.to_result()?;
        let files = trust.zip(objects).zip(examined.config);
        let ((trust, objects), mut config) = files.context("it could not be read")?;
        let restart_only = old.keep_restart_only(&mut config);
        let config = Arc::new((config, examined.findings));
        Ok(Self { config, restart_only, trust, objects, ..self.clone() })
    }

    /// Joins the contents. The findings are those of all of them.
    pub(super) fn join(self) -> Inputs {
        let mut report = Report::default();
        for findings in [&self.config.1, &self.mesh.1, &self.objects.1] {
            report.note(findings);
        }
        if let Some(live) = &self.live {
            report.note(&live.all_findings());
        }
        report.join(self)
    }
}

/// Reads everything and reports the mistakes of all files together. A mistake in one file hides
/// none in the others, if the key that names them can be read.
pub(super) fn load_and_check(source: &Source, examined: Examined) -> Report {
    let path = source.path();
    let mut report = Report::of(&examined);
    let mesh = examined.discovery.as_ref().and_then(|discovery| report.load_mesh(discovery));
    let objects = report.load_objects(&examined.objects);
    let trust = report.load_trust(path, &examined);
    let own = report.load_own(source, &examined, trust.as_deref());
    report.check_control_planes(path, &examined);
    report.check_features(path, &examined);
    report.check_own_domain(&examined, own.as_ref());
    report.findings.0.extend(trust::own_issuer(&examined, own.as_ref(), trust.as_deref()));
    let revocation = trust::revocation_warnings(path, &examined, own.as_ref(), trust.as_deref());
    if let (Some(config), Some(mesh), Some(objects), Some(trust)) =
        (examined.config, mesh, objects, trust)
    {
        let config = Arc::new((config, examined.findings));
        let (restart_only, live, holders) = (Vec::new(), None, Arc::default());
        let files = Files { config, restart_only, mesh, objects, live, trust, holders };
        let inputs = report.join(files);
        report.inputs = Some(Inputs { own, ..inputs });
    }
    report.findings.0.extend(revocation);
    report
}

impl Report {
    fn of(examined: &Examined) -> Self {
        Self { findings: examined.findings.clone(), ..Self::default() }
    }

    fn note(&mut self, findings: &Findings) {
        self.findings.0.extend_from_slice(&findings.0);
    }

    /// Fails if there are mistakes.
    ///
    /// # Errors
    /// All mistakes, one line each.
    fn to_result(&self) -> anyhow::Result<()> {
        ensure!(!self.findings.has_errors(), join(self.findings.with(Severity::Error), "\n"));
        Ok(())
    }

    fn record_errors<T>(&mut self, result: Result<T, Findings>) -> Option<T> {
        result.map_err(|findings| self.note(&findings)).ok()
    }

    /// Loads the mesh file, if the mesh is in one.
    fn load_mesh(&mut self, discovery: &Discovery) -> Option<Loaded<(Mesh, Policies)>> {
        let Discovery::File(MeshFile { path }) = discovery else {
            return Some(Arc::default());
        };
        let loaded = self.record_errors(xds::file::load(path))?;
        self.note(&loaded.1);
        Some(Arc::new(loaded))
    }

    fn load_objects(&mut self, paths: &[PathBuf]) -> Option<Loaded<Objects>> {
        let loaded = self.record_errors(objects::load(paths))?;
        self.note(&loaded.1);
        Some(Arc::new(loaded))
    }

    /// Joins the contents, and adds the findings of the join to those about each content. Under a
    /// control plane, which provides the services and endpoints itself, objects add none.
    fn join(&mut self, mut files: Files) -> Inputs {
        let all;
        let objects = match &files.live {
            Some(live) => {
                all = files.objects.0.with(live.read());
                &all
            }
            None => &files.objects.0,
        };
        let (mesh, _) = &files.mesh.0;
        let (mut config, merged) = objects::merge(files.config(), objects, mesh);
        self.note(&merged);
        let mut joined = objects::join(mesh, objects, &config, &files.holders);
        let is_of_file = config.discovery.is_of_objects();
        if !is_of_file {
            (joined.mesh, joined.conflicts) = (mesh.clone(), Findings::default());
        }
        let of_file = is_of_file.then_some(&joined.mesh);
        let distributed = objects::distribute(&mut config, objects, of_file);
        self.note(&distributed);
        self.note(&joined.conflicts);
        self.note(&joined.warnings);
        let of_live = merged.0.into_iter().chain(distributed.0).chain(joined.warnings.0).collect();
        files.holders = Arc::new(joined.holders);
        let inputs = Inputs {
            config,
            mesh: joined.mesh,
            scope: joined.scope,
            files,
            own: None,
            findings: Findings::default(),
            conflicts: joined.conflicts.lines(),
            of_live,
        };
        let compared = compare::run(&inputs.config, &inputs.mesh, inputs.change(None));
        self.findings.0.extend(compared);
        Inputs { findings: self.findings.clone(), ..inputs }
    }

    /// Loads the own certificate and checks it as peers with this trust would. One from an
    /// authority is not requested: a machine that only checks may have no token.
    fn load_own(
        &mut self,
        source: &Source,
        examined: &Examined,
        trust: Option<&PeerTrust>,
    ) -> Option<IdentityMaterial> {
        let path = source.path();
        let files = match examined.identity.as_ref()? {
            Identity::Files(files) => files,
            Identity::IstioCa(ca) => {
                self.check_identity(source, examined.config.as_ref()?, ca);
                return None;
            }
            Identity::Spiffe(_) => return None,
        };
        if [&files.chain, &files.key, &files.roots].iter().any(|file| examined.is_absent(file)) {
            return None;
        }
        let located = |error: TlsError| located(&error, path, Some(files), examined);
        let own = self.record_errors(IdentityMaterial::load(files).map_err(located))?;
        self.check_key_permissions(path, &files.key, examined);
        // The gateway's own files can be checked without the domains.
        let nothing = PeerTrust::default();
        let trust = trust.unwrap_or(&nothing);
        let verified = own.verify(trust.crls.as_deref(), SystemTime::now());
        let served = verified.and_then(|_| tls::listener_server_config(&own, trust));
        self.record_errors(served.map_err(located))?;
        Some(own)
    }

    /// Reads the roots and tokens of the connections to control planes, each file once.
    fn check_control_planes(&mut self, path: &Path, examined: &Examined) {
        let wrong = control_planes(examined).flat_map(channel::check_files);
        for (file, error) in wrong.filter(|(file, _)| !examined.is_absent(file)) {
            let place = examined.place_of(&file, path);
            let how = "the path of a file with one";
            let finding = Finding::error(&place, error.to_string(), how);
            if !self.findings.0.contains(&finding) {
                self.findings.0.push(finding);
            }
        }
    }

    /// Rejects a source that this build does not have.
    fn check_features(&mut self, path: &Path, examined: &Examined) {
        let is_kubernetes = examined.config.as_ref().is_some_and(|one| one.kubernetes().is_some());
        if is_kubernetes && !cfg!(feature = "kubernetes") {
            let place = Place { file: path.to_owned(), line: 0 };
            let what = "this build cannot watch Kubernetes objects; use one with the cargo \
                        feature `kubernetes`, as images and releases have";
            self.findings.0.push(Finding::error(&place, what.to_owned(), ""));
        }
    }

    /// Warns if the trust domains do not include the gateway's own, which is rarely intended.
    fn check_own_domain(&mut self, examined: &Examined, own: Option<&IdentityMaterial>) {
        let own = match &examined.identity {
            Some(Identity::IstioCa(ca)) => Some(&*ca.trust_domain),
            _ => own.map(|own| &*own.identity.trust_domain),
        };
        let (Some(own), Some(trust)) = (own, &examined.trust) else {
            return;
        };
        if !trust.skip_validation && trust.domains.iter().all(|domain| domain.name != own) {
            let what = format!(
                "the gateway's certificate is of {}, which is not in trust.domains; peers of the \
                 gateway's own cluster are refused",
                own.escape_debug()
            );
            let how = "it there if they are to connect";
            self.findings.0.push(Finding::warning(&examined.trust_place, what, how));
        }
    }

    /// Rejects an invalid identity for certificate requests: the environment may contain only a
    /// part.
    fn check_identity(&mut self, source: &Source, config: &Config, ca: &IstioCa) {
        let id = source.who(config).identity(&ca.trust_domain);
        let place = Place { file: config.file.clone(), line: 0 };
        for (configured, key, variable) in [
            (&ca.namespace, "namespace", "POD_NAMESPACE"),
            (&ca.service_account, "service_account", "SERVICE_ACCOUNT"),
        ] {
            if configured.is_none() && !source.environment().says(variable) {
                let what = format!(
                    "neither `identity.{key}` nor {variable} is set: a certificate is requested \
                     for {id}"
                );
                let how = "the one that the token belongs to";
                self.findings.0.push(Finding::warning(&place, what, how));
            }
        }
        if parse_identity(&id).is_none() {
            let what = format!("{id:?} is not a workload identity");
            let how = "`identity.namespace` and `identity.service_account`, or set POD_NAMESPACE \
                       and SERVICE_ACCOUNT";
            self.findings.0.push(Finding::error(&place, what, how));
        }
    }

    /// Loads the trust domains with their roots, the issuers and the revocation lists. Domains,
    /// issuers and lists whose files do not exist are omitted; the findings contain them.
    fn load_trust(&mut self, path: &Path, examined: &Examined) -> Option<Arc<PeerTrust>> {
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
            .map(Arc::new)
    }

    /// Warns of a private key that every user of the machine may read or write.
    fn check_key_permissions(&mut self, path: &Path, key: &Path, examined: &Examined) {
        let mode = key.metadata().map_or(0, |metadata| metadata.mode());
        if mode & OTHER_USERS_MODE == 0 {
            return;
        }
        let what = format!(
            "private key {} is accessible to every user (mode {:04o}); run `chmod o-rwx`",
            key.display(),
            mode & 0o7777
        );
        self.findings.0.push(Finding::warning(&examined.place_of(key, path), what, ""));
    }
}

/// Returns the control planes that issue certificates and that provide the mesh.
pub fn control_planes(examined: &Examined) -> impl Iterator<Item = &ControlPlane> {
    let authority = match &examined.identity {
        Some(Identity::IstioCa(ca)) => Some(&ca.plane),
        _ => None,
    };
    let source = examined.discovery.as_ref().and_then(Discovery::xds);
    authority.into_iter().chain(source.map(|xds| &xds.plane))
}

/// Formats a mistake in a certificate file with the place that names the file, such as a line of
/// `path`.
fn located(
    error: &TlsError,
    path: &Path,
    own: Option<&IdentityFiles>,
    examined: &Examined,
) -> Findings {
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
    let what = match file {
        Some(file) if !names_file => format!("{}: {error}", file.display()),
        _ => error.to_string(),
    };
    Findings(vec![Finding::error(&place, what, "")])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::dev::Authority;

    const CONFIG: &str = "gateway: {cluster: east}\n\
        identity: {kind: files, chain: leaf.crt, key: leaf.key, roots: root.crt}\n\
        trust: {domains: [{name: east.local, cluster: east, roots: east.crt}]}\n\
        listeners: [{name: cross-network, bind: '127.0.0.1:0'}]\n\
        discovery: {kind: file, path: mesh.yaml}\n\
        exposure: {default: all, files: [objects.yaml]}\n";

    /// Files of a gateway, and the configuration that is read from them.
    struct Folder(tempfile::TempDir);

    impl Folder {
        fn new() -> Self {
            let authority = Authority::new().unwrap();
            let issuer = authority.intermediate("east").unwrap();
            let leaf = issuer.leaf("spiffe://east.local/ns/a/sa/b").unwrap();
            let folder = Self(tempfile::tempdir().unwrap());
            folder.write("leaf.crt", &leaf.chain_pem);
            folder.write("leaf.key", &leaf.key_pem);
            folder.write("root.crt", &authority.root_pem());
            folder.write("east.crt", &authority.root_pem());
            folder.write("mesh.yaml", "services: []\nworkloads: []\n");
            folder.write("objects.yaml", "");
            folder
        }

        fn write(&self, name: &str, text: &str) {
            std::fs::write(self.0.path().join(name), text).unwrap();
        }

        fn source(&self, config: &str) -> Source {
            self.write("strait.yaml", config);
            Source::file(&self.0.path().join("strait.yaml"))
        }

        fn load(&self) -> Inputs {
            let source = self.source(CONFIG);
            Inputs::load(&source, source.examine()).unwrap()
        }

        /// Returns the contents of `files` under another configuration, or its findings.
        fn changed(&self, files: &Files, config: &str) -> Result<Files, String> {
            let source = self.source(config);
            let changed = files.with_config(source.path(), source.examine());
            let folder = format!("{}/", self.0.path().display());
            changed.map_err(|error| error.to_string().replace(&folder, ""))
        }
    }

    #[test]
    fn a_changed_configuration_has_the_files_of_changed_sections_read_alone() {
        let folder = Folder::new();
        let files = folder.load().files;
        for name in ["mesh.yaml", "objects.yaml", "east.crt"] {
            folder.write(name, "kind: [");
        }
        let config = CONFIG.replace("default: all, ", "") + "workers: 3\n";
        let changed = folder.changed(&files, &config).unwrap();
        assert!(Arc::ptr_eq(&changed.mesh, &files.mesh));
        assert!(Arc::ptr_eq(&changed.objects, &files.objects));
        assert!(Arc::ptr_eq(&changed.trust, &files.trust));
        assert_ne!(changed.config().exposure, files.config().exposure);
        assert_eq!((changed.config().workers, changed.restart_only), (0, vec!["workers"]));

        let config = CONFIG.replace("trust: {", "trust: {max_verify_depth: 2, ");
        let config = config.replace("[objects.yaml]", "[objects.yaml, mesh.yaml]");
        let rejected = folder.changed(&files, &(config + "worker: 3\n")).unwrap_err();
        for finding in [
            "strait.yaml:7: error: ",
            "strait.yaml:3: error: east.crt: ",
            "objects.yaml:1: error: ",
            "mesh.yaml:1: error: ",
        ] {
            assert!(rejected.contains(finding), "{finding}: {rejected}");
        }
    }

    #[test]
    fn the_change_of_a_mesh_has_no_part_of_an_equal_configuration() {
        let inputs = Folder::new().load();
        let first = inputs.change(None);
        assert!(first.mesh.is_some() && first.exposure.is_some() && first.networks.is_some());
        let change = inputs.change(Some(&inputs.config));
        assert!(change.mesh.is_some() && change.policies.is_some());
        assert!(change.exposure.is_none() && change.names.is_none() && change.traffic.is_none());
        assert!(change.networks.is_none() && change.has_passthrough.is_none());
    }
}
