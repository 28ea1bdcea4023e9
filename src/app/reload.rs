//! Changes while it runs: files are read again, and what is good is applied at once. What is bad
//! is explained and counted, and the state of before stays.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::PathBuf;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tracing::{error, info, warn};

use crate::config::{Config, Discovery, Identity};
use crate::datapath::Gateway;
use crate::snapshot::Publisher;
use crate::snapshot::builder::Change;
use crate::status::{Status, What};
use crate::telemetry::LogHandle;
use crate::tls::{self, Material, TrustedDomain};
use crate::watch::FileWatcher;
use crate::xds;

use super::App;
use super::inputs::{self, Inputs};

/// Watches the three kinds of files and applies their changes, one at a time.
pub(super) struct Reloader {
    config: Arc<ArcSwap<Config>>,
    gateway: Arc<Gateway>,
    status: Arc<Status>,
    publisher: Publisher,
    log: LogHandle,
    material: Arc<Material>,
    seen: [u64; What::ALL.len()],
}

impl Reloader {
    pub(super) fn new(app: &App, inputs: Inputs, publisher: Publisher, log: LogHandle) -> Self {
        let seen = What::ALL.map(|what| fingerprint(&files(&inputs.config, what)));
        for what in What::ALL {
            app.status.set_reload(what, Ok(()));
        }
        Self {
            config: Arc::clone(&app.config),
            gateway: Arc::clone(&app.gateway),
            status: Arc::clone(&app.status),
            publisher,
            log,
            material: Arc::new(inputs.material),
            seen,
        }
    }

    pub(super) async fn run(mut self) {
        let all = |config: &Config| {
            What::ALL
                .iter()
                .flat_map(|&what| files(config, what))
                .collect()
        };
        let mut watcher = match FileWatcher::new(all(&self.config.load())) {
            Ok(watcher) => watcher,
            Err(error) => {
                return error!(%error, "cannot watch files; changes need a restart");
            }
        };
        loop {
            watcher.changed().await;
            for what in What::ALL {
                self.reload_if_changed(what).await;
            }
            if let Err(error) = watcher.replace(all(&self.config.load())) {
                warn!(%error, "cannot watch a directory; changes there go unseen");
            }
        }
    }

    async fn reload_if_changed(&mut self, what: What) {
        let now = fingerprint(&files(&self.config.load(), what));
        let Some(seen) = self.seen.get_mut(what as usize) else {
            return;
        };
        if std::mem::replace(seen, now) == now {
            return;
        }
        let result = match what {
            What::Config => self.reload_config(),
            What::Mesh => self.reload_mesh().await,
            What::Certificates => self.reload_certificates(),
        };
        match &result {
            Ok(()) => info!(what = what.label(), "reloaded"),
            Err(error) => error!(
                what = what.label(), %error,
                "a changed file cannot be used; what was loaded before stays in force"
            ),
        }
        self.gateway.metrics.reload(what, result.is_ok());
        self.status
            .set_reload(what, result.map_err(|error| format!("{error:#}")));
    }

    fn reload_config(&self) -> anyhow::Result<()> {
        let old = self.config.load_full();
        let new = Config::load(&old.file)?;
        for key in old.restart_only_changes(&new) {
            warn!(
                key,
                "the change of this key takes effect with the next start"
            );
        }
        // What needs a restart keeps its old value, so that every page shows what is in force.
        let new = Config {
            trust: new.trust,
            exposure: new.exposure,
            log: new.log,
            ..Config::clone(&old)
        };
        let domains = TrustedDomain::load_all(&new.trust.domains)?;
        let tls = tls::server_config(&self.material, &domains)?;
        if new.log.level != old.log.level {
            self.log.set(&new.log.level).map_err(anyhow::Error::msg)?;
        }
        self.gateway.tls.store(tls);
        self.publisher.update(Change {
            trust: Some(inputs::trust_set(&new)),
            exposure: Some(inputs::exposure_table(&new)),
            ..Change::default()
        });
        self.config.store(Arc::new(new));
        Ok(())
    }

    async fn reload_mesh(&self) -> anyhow::Result<()> {
        let config = self.config.load_full();
        let Discovery::File { path } = config.discovery.clone();
        let network = config.gateway.network.as_str().into();
        // A large file takes its time, and admin pages live on this thread.
        let mesh = tokio::task::spawn_blocking(move || xds::file::load(&path)).await??;
        self.publisher.update(Change {
            mesh: Some((mesh, network)),
            ..Change::default()
        });
        Ok(())
    }

    fn reload_certificates(&mut self) -> anyhow::Result<()> {
        let config = self.config.load();
        let Identity::Files(files) = &config.identity;
        let material = Material::load(files)?;
        let domains = TrustedDomain::load_all(&config.trust.domains)?;
        self.gateway
            .tls
            .store(tls::server_config(&material, &domains)?);
        self.status.set_certificate(material.status());
        self.material = Arc::new(material);
        Ok(())
    }
}

/// The files of each kind, as the configuration in force names them.
fn files(config: &Config, what: What) -> Vec<PathBuf> {
    match what {
        What::Config => vec![config.file.clone()],
        What::Mesh => {
            let Discovery::File { path } = &config.discovery;
            vec![path.clone()]
        }
        What::Certificates => {
            let Identity::Files(own) = &config.identity;
            let own = [&own.chain, &own.key, &own.roots];
            let domains = config
                .trust
                .domains
                .iter()
                .filter_map(|domain| domain.roots.as_ref());
            own.into_iter().chain(domains).cloned().collect()
        }
    }
}

/// Tells whether contents have changed. It guards nothing, so a plain hash will do.
fn fingerprint(files: &[PathBuf]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for file in files {
        std::fs::read(file)
            .map_err(|error| error.kind())
            .hash(&mut hasher);
    }
    hasher.finish()
}
