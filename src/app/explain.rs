//! Explanations of the outcome of a tunnel, from the running gateway or from files.

use std::sync::Arc;

use bytesize::ByteSize;
use tokio::time::Instant;

use crate::admin::ExplainHandler;
use crate::config::{self, Config, Discovery};
use crate::datapath::dial::DenyList;
use crate::datapath::listener::{Listener, ListenerRules};
use crate::explain::{self, Answer, ConfigPositions, ExplainState, Outcome, Question};
use crate::lifecycle::{DrainScope, Phase};
use crate::snapshot::builder::Change;
use crate::snapshot::{Alias, ExclusionReason, Publisher};
use crate::wire::DrainTarget;

use super::listeners::LISTENERS;
use super::state::App;
use super::{Inputs, traffic};

/// Answers for a gateway that starts with these files and has no load.
///
/// # Errors
/// The question is invalid, or the mesh is not in files.
pub fn offline(inputs: &Inputs, question: &Question) -> Result<Answer, String> {
    let config = &inputs.config;
    if matches!(config.discovery, Discovery::Kubernetes(_)) {
        return Err(
            "cannot explain from files: the mesh comes from a Kubernetes API server; omit \
                    `-c` to query the running gateway"
                .to_owned(),
        );
    }
    if let Some(xds) = config.discovery.xds() {
        return Err(format!(
            "cannot explain from files: the mesh comes from {}; omit `-c` to query the running \
             gateway",
            xds.plane.address
        ));
    }
    let publisher = publish(inputs);
    let snapshot = publisher.reader().snapshot();
    let bindings = config.bindings.iter().map(|binding| {
        let listener = config::Listener::from(binding);
        Arc::new(Listener::new(&listener, DrainScope::default()))
    });
    let world = ExplainState {
        snapshot: &snapshot,
        deny: &DenyList::of(config),
        listeners: &listeners(config),
        bindings: &bindings.collect::<Vec<_>>(),
        places: &places(config),
        links: &[],
        held: &[],
        has_room: true,
        now: Instant::now(),
    };
    explain::run(&world, question)
}

/// Publishes the snapshot of a gateway that starts with these files.
pub fn publish(inputs: &Inputs) -> Publisher {
    let position = Some(traffic::position(&inputs.config, None));
    let publisher = Publisher::default();
    publisher.update(Change { position, ..inputs.change(None) });
    publisher
}

/// Answers from the current snapshot, loads and ejections.
pub(super) fn for_gateway(app: &App) -> ExplainHandler {
    let (data_path, config) = (Arc::clone(&app.data_path), Arc::clone(&app.config));
    let (open, status) = (Arc::clone(&app.listeners), Arc::clone(&app.status));
    Arc::new(move |question| {
        let config = config.load();
        let held: Vec<_> = status.held().into_iter().flatten().collect();
        let world = ExplainState {
            snapshot: &data_path.reader.snapshot(),
            deny: &data_path.deny,
            listeners: &listeners(&config),
            bindings: &open.bindings(),
            places: &places(&config),
            links: &data_path.metrics.budgets.reduced(),
            held: &held,
            has_room: data_path.budget.has_room(),
            now: Instant::now(),
        };
        let mut answer = explain::run(&world, question)?;
        let cluster = answer.peer.cluster.as_deref().unwrap_or_default();
        if let Some(bytes) = data_path.turns.byte_limit(cluster)
            && answer.listener.protocol == "hbone"
        {
            let bytes = ByteSize(bytes.into());
            answer.notes.push(format!(
                "`limits.clusters` limits all tunnels of cluster {cluster} to {bytes} per second"
            ));
        }
        if data_path.lifecycle.phase() >= Phase::Draining {
            answer.outcome = Outcome::not_accepting("draining");
        } else if status.list_pending().iter().any(|one| one == LISTENERS) {
            answer.outcome = Outcome::not_accepting("not_ready");
        } else if let Some(target) = drained_listener(&world, &answer) {
            answer.outcome = Outcome::not_accepting("draining");
            answer.notes.push(ExclusionReason::Evacuated(target).to_string());
        }
        Ok(answer)
    })
}

fn drained_listener(world: &ExplainState<'_>, answer: &Answer) -> Option<DrainTarget> {
    let target = DrainTarget::Listener(answer.listener.name.as_str().into());
    world.snapshot.balancing.evacuated.contains_key(&target).then_some(target)
}

fn listeners(config: &Config) -> Vec<(String, ListenerRules)> {
    let listeners = config.listeners.iter();
    let named = listeners.map(|listener| (listener.name.clone(), ListenerRules::new(listener)));
    named.collect()
}

/// Returns the lines of the configuration entries that an answer may name.
fn places(config: &Config) -> ConfigPositions {
    let services = config.exposure.services.iter().map(|entry| entry.line.clone());
    let aliases = config.names.aliases.iter().enumerate();
    let aliases = aliases.map(|(index, alias)| {
        let label = Alias::of(alias, &config.exposure.services).label;
        (label, (index, alias.line.within(&config.file)))
    });
    ConfigPositions {
        file: config.file.clone(),
        services: services.collect(),
        aliases: aliases.collect(),
    }
}
