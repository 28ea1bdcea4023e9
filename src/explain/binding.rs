//! Explanation of a connection to a binding: the gateways of other clusters that a local client is
//! led to.

use std::net::IpAddr;
use std::sync::Arc;

use crate::datapath::binding::Binding;
use crate::datapath::forward::establish;
use crate::datapath::identity::Peer;
use crate::datapath::listener::Listener;
use crate::reason::Reason;

use super::answer::{
    Answer, ListenerRow, LookupRow, Outcome, PeerRow, RejectionForm, RuleRow, UnusedRow,
};
use super::{ExplainState, Explainer, Question};

/// Predicts the outcome of a connection to the binding that `wanted` names.
///
/// # Errors
/// The defect of the question, with the remedy.
pub(super) fn run(explainer: Explainer<'_>, wanted: &str) -> Result<Answer, String> {
    let Explainer { state, question, .. } = explainer;
    let (listener, binding) = select(state, wanted)?;
    let has_identity = binding.requires_identity();
    let own = Question {
        binding: question.binding.clone(),
        address: question.address,
        from: question.from.clone().filter(|_| has_identity),
        cluster: question.cluster.clone().filter(|_| has_identity),
        all: question.all,
        ..Question::default()
    };
    if *question != own {
        let what = "clients of a binding send no CONNECT, and have an identity only where it has \
                    `to`; write --binding with --address and --all, and for `to` with --from and \
                    --cluster";
        return Err(what.to_owned());
    }
    let at = question.address;
    let mut answer = Answer {
        snapshot: state.snapshot.version,
        listener: ListenerRow {
            name: format!("binding {}", binding.authority),
            protocol: "binding".to_owned(),
        },
        peer: PeerRow {
            description: format!(
                "a local client{} without an identity; it has that of this gateway",
                at.map(|address| format!(" at {address}")).unwrap_or_default()
            ),
            ..PeerRow::default()
        },
        policies: "off".to_owned(),
        ..Answer::default()
    };
    answer.outcome = evaluate(explainer, (listener, &binding), &mut answer)?;
    Ok(answer)
}

fn evaluate(
    explainer: Explainer<'_>,
    (listener, binding): (&Listener, &Arc<Binding>),
    answer: &mut Answer,
) -> Result<Outcome, String> {
    let Explainer { state, question, .. } = explainer;
    let form = RejectionForm::Connection;
    let admits = |address: &IpAddr| listener.rules().admits(*address);
    let refused = question.address.filter(|address| !admits(address));
    answer.lookups.push(lookup(binding, refused));
    if refused.is_some() {
        return Ok(Outcome::not_in_sources());
    }
    if question.address.is_none() {
        let note = "the binding has `clients`; test a client's address by --address";
        answer.notes.push(note.to_owned());
    }
    let peer = if binding.requires_identity() {
        match explainer.authenticate(Arc::default(), answer)? {
            Ok(peer) => peer,
            Err(refused) => return Ok(refused),
        }
    } else {
        Peer::unauthenticated(question.address(), Arc::default(), None)
    };
    let counted = listener.clients.check(question.address().ip(), &binding.config);
    let counted = counted.map_err(|full| {
        answer.notes.push(full);
        Reason::BindingFull
    });
    let snapshot = state.snapshot;
    let decided = establish::decide_binding(snapshot, &peer, binding, counted, state.room());
    if let (Err(rejection), Some(lookup)) = (&decided, answer.lookups.last_mut())
        && rejection.reason == Reason::NotForPeer
    {
        lookup.rule.allowed = false;
        lookup.rule.change = Some("add the client to `to` of the binding".to_owned());
    }
    if let Ok((permit, ())) = &decided {
        let unused = binding.endpoints.unused(snapshot).into_iter();
        let unused = unused.map(|(gateway, why)| UnusedRow { workload: gateway.into(), why });
        answer.unused = unused.collect();
        if !permit.route().endpoints.endpoints.is_empty() {
            let note = "the gateways decide whether they expose the service to the identity of \
                        this one";
            answer.notes.push(note.to_owned());
        } else if answer.unused.is_empty() {
            answer.notes.push(format!(
                "no gateway of {} has an address; only a running gateway resolves hostnames",
                binding.clusters()
            ));
        }
    }
    Ok(explainer.pick(&peer, decided, form, answer))
}

/// Describes the service of a binding and its clients. `refused` is an address that is none.
fn lookup(binding: &Binding, refused: Option<IpAddr>) -> LookupRow {
    let config = &binding.config;
    let clients = config.clients.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    LookupRow {
        requested: binding.authority.to_string(),
        from: Some(format!("for connections to {}", config.listen)),
        rule: RuleRow {
            allowed: refused.is_none(),
            description: match (binding.requires_identity(), clients.is_empty()) {
                (false, _) => format!("`clients` of the binding: {clients}"),
                (true, true) => "`to` of the binding".to_owned(),
                (true, false) => format!("`to` of the binding, from {clients}"),
            },
            change: refused.map(|address| format!("add {address} to `clients` of the binding")),
            ..RuleRow::default()
        },
        ..LookupRow::default()
    }
}

/// Returns the binding with this service, `listen` address or name.
fn select<'a>(
    state: &ExplainState<'a>,
    wanted: &str,
) -> Result<(&'a Listener, Arc<Binding>), String> {
    let all = state.bindings.iter().filter_map(|listener| Some((&**listener, listener.binding()?)));
    let (mut found, others): (Vec<_>, Vec<_>) = all.partition(|(_, binding)| {
        let config = &binding.config;
        let is_named = |name: &str| name.eq_ignore_ascii_case(wanted);
        is_named(&binding.authority)
            || is_named(&config.service.host)
            || config.listen.to_string() == wanted
            || config.names.iter().any(|name| is_named(name))
    });
    let list = |bindings: &[(&Listener, Arc<Binding>)]| {
        let each = bindings.iter();
        let each = each.map(|(_, of)| format!("{} ({})", of.config.listen, of.authority));
        each.collect::<Vec<_>>().join(", ")
    };
    if found.len() > 1 {
        let found = list(&found);
        return Err(format!(
            "several bindings are called {wanted:?}; write --binding with one of {found}"
        ));
    }
    found.pop().ok_or_else(|| {
        if let Some(rule) = state.snapshot.scope.unneeded.get(wanted) {
            return format!("the binding {wanted:?} is not opened: {rule}");
        }
        if others.is_empty() {
            return "there are no `bindings`; write --from and --to, or --sni".to_owned();
        }
        let others = list(&others);
        format!("unknown binding {wanted:?}; write --binding with one of {others}")
    })
}
