//! Reload of changed files at run time. Valid content is applied immediately. Invalid content is
//! logged and counted, and the previous state stays in use.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::File;
use std::hash::{Hash, Hasher};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::time::sleep;
use tracing::{error, info, warn};

use crate::config::{Config, Discovery, Examined, Identity, Log, Source};
use crate::snapshot::Policies;
use crate::snapshot::builder::Change;
use crate::status::ReloadSource;
use crate::telemetry::LogHandle;
use crate::tls::{IdentityMaterial, PeerTrust};
use crate::watch::FileWatcher;
use crate::xds;
use crate::xds::objects::{self, JoinResult, object_files};
use crate::yaml::FILE_BYTES_MAX;

use super::certificates::SharedCertificates;
use super::inputs::{Inputs, MeshFiles, Report};
use super::listeners::ClosedListeners;
use super::signals::ReloadSignal;
use super::state::App;
use super::trust;

/// Interval at which rejected certificates are tried again.
const CERTIFICATE_RETRY: Duration = Duration::from_secs(10);

/// Fingerprints of the files when they were last read. They are taken before the reading, so that
/// a concurrent change is found afterwards.
pub(super) type Fingerprints = BTreeMap<PathBuf, u64>;

/// Causes of reloads: files whose fingerprints differ from those at the start, and a signal.
pub(super) struct Triggers {
    pub(super) seen: Fingerprints,
    pub(super) signal: ReloadSignal,
}

/// Cause of a pass over the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    /// A file may have changed.
    Changed,
    /// Another pass came right before, which may have read the same changes.
    Second,
    /// SIGHUP: all files count as changed.
    All,
}

/// Watches the four kinds of files and applies their changes, one at a time. It has a dedicated
/// thread, because a mount that hangs blocks it.
pub(super) struct Reloader {
    source: Source,
    app: App,
    log: LogHandle,
    certificates: SharedCertificates,
    triggers: Triggers,
    /// Configuration without the entries of objects.
    own_config: Config,
    /// Content of the files of the mesh before the join with the configuration.
    mesh_files: MeshFiles,
    /// Error of the last reload of each kind that failed.
    failed: BTreeMap<ReloadSource, String>,
    /// Files that a rejected configuration names: the configuration may become valid with one of
    /// them.
    files_of_rejected: Vec<PathBuf>,
    /// Last warnings.
    last_warnings: HashSet<String>,
    /// Mistakes in the objects in use, which are skipped.
    passed_over: Vec<String>,
}

impl Reloader {
    pub(super) fn new(
        source: Source,
        app: &App,
        inputs: Inputs,
        triggers: Triggers,
        certificates: SharedCertificates,
        log: LogHandle,
    ) -> Self {
        let config = app.config.load();
        for what in ReloadSource::ALL {
            if !files(&config, what).is_empty() {
                app.status.set_reload(what, Ok(()));
            }
        }
        let mut reloader = Self {
            source,
            app: app.clone(),
            log,
            certificates,
            triggers,
            own_config: inputs.own_config,
            mesh_files: inputs.mesh_files,
            failed: BTreeMap::new(),
            files_of_rejected: Vec::new(),
            last_warnings: inputs.warnings.into_iter().collect(),
            passed_over: Vec::new(),
        };
        let closed = app.listeners.closed().of_objects;
        reloader.record_skipped_objects([inputs.skipped_objects, closed].concat());
        reloader
    }

    pub(super) async fn run(mut self) {
        let mut files = self.files();
        let mut watcher = FileWatcher::new(&files)
            .inspect_err(|error| error!(%error, "cannot watch files; changes need SIGHUP"))
            .ok();
        let mut pass = Pass::Changed;
        loop {
            // Also before the first event: a file may have changed before it was watched.
            if self.apply_changes(pass) {
                // A file that changed between its fingerprint and its reading has an outdated
                // fingerprint. A change back to the old content would then be missed.
                self.apply_changes(Pass::Second);
            }
            pass = Pass::Changed;
            let now = self.files();
            if now == files {
                pass = self.next_pass(watcher.as_mut()).await;
                continue;
            }
            if let Some(Err(error)) = watcher.as_mut().map(|watcher| watcher.replace(&now)) {
                warn!(%error, "cannot watch files; their changes are not detected");
            }
            files = now;
        }
    }

    /// Waits for an event of the watcher, or for SIGHUP. Rejected certificates are tried again
    /// meanwhile.
    async fn next_pass(&mut self, watcher: Option<&mut FileWatcher>) -> Pass {
        let changed = async {
            match watcher {
                Some(watcher) => watcher.changed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = changed => Pass::Changed,
            () = sleep(CERTIFICATE_RETRY) => {
                self.retry_certificates();
                Pass::Changed
            }
            () = self.triggers.signal.received() => {
                info!(signal = "SIGHUP", "reading all files again");
                Pass::All
            }
        }
    }

    /// Returns all files whose changes matter.
    fn files(&self) -> Vec<PathBuf> {
        let config = self.app.config.load();
        let in_force = ReloadSource::ALL.iter().flat_map(|&what| files(&config, what));
        let all: BTreeSet<_> = in_force.chain(self.files_of_rejected.iter().cloned()).collect();
        all.into_iter().collect()
    }

    /// Reloads the changed sources, and returns true if there were any. Sources that failed
    /// before are tried again after every change, because they may depend on it: a root on its
    /// file, a configuration on a file that it names.
    fn apply_changes(&mut self, pass: Pass) -> bool {
        let files = self.files();
        let now = fingerprints(&files);
        let seen = &self.triggers.seen;
        let is_new =
            |(file, print): &(&PathBuf, &u64)| pass == Pass::All || seen.get(*file) != Some(*print);
        let changed = now.iter().filter(is_new).map(|(file, _)| file.clone());
        let changed: BTreeSet<_> = changed.collect();
        self.triggers.seen = now;
        if changed.is_empty() {
            return false;
        }
        let config = self.app.config.load_full();
        let has_changed = |what| {
            let mut own = self::files(&config, what).into_iter();
            own.any(|file| changed.contains(&file))
        };
        let is_due = |what: &ReloadSource| has_changed(*what) || self.failed.contains_key(what);
        let is_new_change = |what| pass != Pass::Second && has_changed(what);
        let mut due: Vec<_> = ReloadSource::ALL.into_iter().filter(is_due).collect();
        loop {
            let tried = due.len();
            let mut failures = Vec::new();
            for what in std::mem::take(&mut due) {
                match self.reload(what) {
                    Ok(unused) if unused.is_empty() => self.record_success(what),
                    Ok(left) => {
                        self.record_partial_success(what, left.join("\n"), is_new_change(what))
                    }
                    Err(error) => failures.push((what, format!("{error:#}"))),
                }
            }
            if failures.is_empty() || failures.len() == tried {
                for (what, error) in failures {
                    self.record_failure(what, error, is_new_change(what));
                }
                return true;
            }
            due.extend(failures.into_iter().map(|(what, _)| what));
        }
    }

    /// Tries the certificates again that the last reload rejected, which become usable without a
    /// change if they were not valid yet.
    fn retry_certificates(&mut self) {
        let what = ReloadSource::Certificates;
        if self.failed.contains_key(&what) {
            match self.reload(what) {
                Ok(_) => self.record_success(what),
                Err(error) => self.record_failure(what, format!("{error:#}"), false),
            }
        }
    }

    fn record_success(&mut self, what: ReloadSource) {
        info!(what = what.label(), "reloaded");
        self.failed.remove(&what);
        self.app.data_path.metrics.reload(what, true);
        self.app.status.set_reload(what, Ok(()));
    }

    /// Reports a failure, unless it repeats the last one and `is_news` is false.
    fn record_failure(&mut self, what: ReloadSource, error: String, is_news: bool) {
        if self.failed.get(&what) == Some(&error) && !is_news {
            return;
        }
        error!(
            what = what.label(), %error,
            "cannot apply changed file; the previous state stays in use"
        );
        self.app.data_path.metrics.reload(what, false);
        self.app.status.set_reload(what, Err(error.clone()));
        self.failed.insert(what, error);
    }

    /// Reports the parts of a source that are not in use. They are tried again after every
    /// change. Objects are read again only after a change of theirs, and joined again with every
    /// mesh and configuration.
    fn record_partial_success(&mut self, what: ReloadSource, left: String, is_news: bool) {
        if self.failed.get(&what) == Some(&left) && !is_news {
            return;
        }
        error!(what = what.label(), error = %left, "file applied in part");
        self.app.data_path.metrics.reload(what, false);
        self.app.status.set_partial_reload(what, left.clone());
        match what {
            ReloadSource::Objects => self.failed.remove(&what),
            _ => self.failed.insert(what, left),
        };
    }

    /// Reports the objects that are not in use since they were joined with another file. While
    /// newer files of objects are unusable, the status keeps that error.
    fn record_skipped_objects(&mut self, passed_over: Vec<String>) {
        let what = ReloadSource::Objects;
        if passed_over == self.passed_over {
            return;
        }
        let left = passed_over.join("\n");
        match (passed_over.is_empty(), self.failed.contains_key(&what)) {
            (true, true) => {}
            (true, false) => self.record_success(what),
            (false, true) => {
                error!(what = what.label(), error = %left, "file applied in part");
            }
            (false, false) => self.record_partial_success(what, left, true),
        }
        self.passed_over = passed_over;
    }

    /// Reloads a source. Returns the parts of the new state that are not in use, one line each.
    fn reload(&mut self, what: ReloadSource) -> anyhow::Result<Vec<String>> {
        match what {
            ReloadSource::Config => self.reload_config(),
            ReloadSource::Mesh => self.reload_mesh(),
            ReloadSource::Objects => self.reload_objects(),
            ReloadSource::Certificates => {
                let reloaded = self.reload_certificates();
                self.open_closed_bindings();
                reloaded
            }
        }
    }

    fn reload_config(&mut self) -> anyhow::Result<Vec<String>> {
        let old = self.app.config.load_full();
        self.files_of_rejected = named_files(&self.source.examine());
        for (file, print) in fingerprints(&self.files_of_rejected) {
            self.triggers.seen.entry(file).or_insert(print);
        }
        let examined = self.source.examine();
        let mut report = Report::from_findings(&examined.findings);
        let trust = report.load_trust(&old.file, &examined);
        let objects = report.load_objects(&examined.objects);
        report.note(&self.mesh_files.mesh_findings);
        let new = examined.config.zip(objects);
        let new = new.map(|(new, (objects, object_findings))| {
            let restart_only = old.restart_only_changes(&new);
            let own = without_restart_only(&old, new);
            let mut mesh_files = MeshFiles { objects, object_findings, ..self.mesh_files.clone() };
            let (new, joined) = report.join(&own, &mut mesh_files);
            (own, new, mesh_files, joined, restart_only)
        });
        report.to_result()?;
        let ((own, new, mesh_files, joined, restart_only), trust) =
            new.zip(trust).context("it could not be read")?;
        let mut certificates = self.certificates.lock();
        let served = certificates.server_config(None, Some(&trust))?;
        if new.log.level != old.log.level {
            let set = self.log.configure(&new.log.level);
            set.map_err(anyhow::Error::msg)?;
        }
        let metrics = &self.app.data_path.metrics;
        metrics.set_access_mode(new.log.access);
        metrics.set_link_budgets(new.links.as_deref(), &new.gateway.cluster);
        let set = trust::set(&new, &trust);
        certificates.replace(None, Some(trust), served);
        drop(certificates);
        let change = Change { trust: Some(set), ..self.change(&new, joined) };
        let file = new.file.display().to_string();
        self.own_config = own;
        self.mesh_files = mesh_files;
        let closed = self.publish(new, change);
        let mut left = closed.own;
        left.extend(restart_only.into_iter().map(|key| {
            format!("{file}: `{key}` needs a restart; the value of the start stays in use")
        }));
        self.files_of_rejected.clear();
        self.warn(report.warnings);
        self.record_skipped_objects([report.skipped_objects, closed.of_objects].concat());
        Ok(left)
    }

    /// Publishes a configuration. Returns the listeners that are not open.
    fn publish(&self, new: Config, change: Change) -> ClosedListeners {
        // Before the snapshot update, whose generation causes open tunnels to be evaluated with
        // them.
        let listeners = self.app.listeners.update_in_place(&new);
        self.app.publisher.update(Change { listeners, ..change });
        // After the snapshot update, which contains the targets of a new listener.
        let closed = self.app.listeners.apply(&new);
        self.app.config.store(Arc::new(new));
        closed
    }

    fn reload_mesh(&mut self) -> anyhow::Result<Vec<String>> {
        let Discovery::File { path } = &self.own_config.discovery else {
            return Ok(Vec::new());
        };
        let ((mesh, policies), mesh_findings) = xds::file::load(path)?;
        let mesh_files = MeshFiles {
            mesh,
            policies: policies.clone(),
            mesh_findings,
            ..self.mesh_files.clone()
        };
        let left = self.publish_files(mesh_files, Some(policies));
        self.record_skipped_objects(left);
        Ok(Vec::new())
    }

    fn reload_objects(&mut self) -> anyhow::Result<Vec<String>> {
        let (objects, object_findings) = objects::load(&self.own_config.exposure.files)?;
        let mesh_files = MeshFiles { objects, object_findings, ..self.mesh_files.clone() };
        let left = self.publish_files(mesh_files, None);
        self.passed_over.clone_from(&left);
        Ok(left)
    }

    /// Tries again to open the bindings of objects that are closed. Those of the configuration keep
    /// its reload due, and a change of the mesh or of objects publishes all listeners.
    fn open_closed_bindings(&mut self) {
        if !self.app.listeners.closed().of_objects.is_empty() {
            let left = self.publish_files(self.mesh_files.clone(), None);
            self.record_skipped_objects(left);
        }
    }

    /// Joins the files with the configuration, and publishes both. Returns the parts of objects
    /// that are not in use.
    fn publish_files(&mut self, mut files: MeshFiles, policies: Option<Policies>) -> Vec<String> {
        let config = self.app.config.load_full();
        let mut report = Report::from_findings(&files.mesh_findings);
        report.note(&files.object_findings);
        let (new, joined) = report.join(&self.own_config, &mut files);
        let change = Change { policies, ..self.change(&new, joined) };
        self.mesh_files = files;
        let closed = if new == *config {
            self.app.publisher.update(change);
            self.app.listeners.apply(&new)
        } else {
            self.publish(new, change)
        };
        self.warn(report.warnings);
        [report.skipped_objects, closed.of_objects].concat()
    }

    /// Returns the change of the snapshot for a configuration and the joined files, and publishes
    /// their conflicts in the status. A control plane provides the mesh itself.
    fn change(&self, config: &Config, joined: JoinResult) -> Change {
        self.app.status.set_conflicts(joined.conflicts.lines());
        let network = config.gateway.network.as_str();
        Change {
            mesh: match config.discovery {
                Discovery::File { .. } => Some((joined.mesh, network.into())),
                Discovery::Istio { .. } | Discovery::Envoy { .. } => None,
            },
            scope: Some(joined.scope),
            ..Change::of(config)
        }
    }

    /// Logs the warnings that were not among the last ones.
    fn warn(&mut self, warnings: Vec<String>) {
        for warning in &warnings {
            if !self.last_warnings.contains(warning) {
                warn!("{warning}");
            }
        }
        self.last_warnings = warnings.into_iter().collect();
    }

    fn reload_certificates(&self) -> anyhow::Result<Vec<String>> {
        let config = self.app.config.load();
        let own = match &config.identity {
            Identity::Files(files) => Some(IdentityMaterial::load(files)),
            Identity::IstioCa(_) | Identity::Spiffe { .. } => None,
        };
        let trust = PeerTrust::load(&config.trust);
        let mut certificates = self.certificates.lock();
        let reloaded = certificates.reload(own, trust);
        let set = trust::set(&config, certificates.trust());
        drop(certificates);
        // Files of issuers define clusters; few changes of certificates affect them.
        if *self.app.data_path.reader.load().trust != set {
            self.app.publisher.update(Change { trust: Some(set), ..Change::default() });
        }
        reloaded.map(|()| Vec::new()).map_err(anyhow::Error::msg)
    }
}

/// Returns the new configuration as far as it can be applied at run time. Keys that need a
/// restart keep their old value, so that every page shows the values in use.
fn without_restart_only(old: &Config, new: Config) -> Config {
    Config {
        trust: new.trust,
        listeners: new.listeners,
        exposure: new.exposure,
        links: new.links,
        names: new.names,
        policy: new.policy,
        traffic: new.traffic,
        networks: new.networks,
        bindings: new.bindings,
        log: Log { level: new.log.level, access: new.log.access, ..old.log.clone() },
        ..old.clone()
    }
}

/// Returns the files of each kind that the configuration in use names.
fn files(config: &Config, what: ReloadSource) -> Vec<PathBuf> {
    match what {
        ReloadSource::Config => vec![config.file.clone()],
        ReloadSource::Mesh => match &config.discovery {
            Discovery::File { path } => vec![path.clone()],
            Discovery::Istio { .. } | Discovery::Envoy { .. } => Vec::new(),
        },
        ReloadSource::Objects => with_contents(&config.exposure.files),
        ReloadSource::Certificates => {
            let own = match &config.identity {
                Identity::Files(own) => vec![&own.chain, &own.key, &own.roots],
                // Read again for each certificate.
                Identity::IstioCa(_) | Identity::Spiffe { .. } => Vec::new(),
            };
            let all = own.into_iter().chain(config.trust.files());
            all.cloned().collect()
        }
    }
}

/// Returns the files that a configuration names, whether it is in use or not.
pub(super) fn named_files(examined: &Examined) -> Vec<PathBuf> {
    let paths = examined.named.iter().map(|(path, _)| path.clone());
    with_contents(&paths.collect::<Vec<_>>())
}

/// Returns the paths, and the files in those that are directories.
fn with_contents(paths: &[PathBuf]) -> Vec<PathBuf> {
    let files = paths.iter().flat_map(|path| object_files(path).unwrap_or_default());
    files.chain(paths.iter().cloned()).collect()
}

/// Returns the fingerprints of the files.
pub(super) fn fingerprints(files: &[PathBuf]) -> Fingerprints {
    let print = |file: &PathBuf| (file.clone(), fingerprint(file));
    files.iter().map(print).collect()
}

/// Reads at most one byte more than the size limit: a larger file is rejected, so the rest is not
/// needed.
fn read_limited(file: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let opened = File::open(file)?;
    opened.take(FILE_BYTES_MAX as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns a hash of the content that detects changes. It protects nothing, so a plain hash
/// suffices.
fn fingerprint(file: &Path) -> u64 {
    let mut hasher = DefaultHasher::new();
    let hashed = file.metadata().and_then(|metadata| {
        if metadata.is_file() {
            read_limited(file)?.hash(&mut hasher);
        } else if metadata.is_dir() {
            object_files(file)?.hash(&mut hasher);
        }
        // Reading a pipe would take the data from the loader, or block.
        Ok(())
    });
    hashed.map_err(|error| error.kind()).hash(&mut hasher);
    hasher.finish()
}
