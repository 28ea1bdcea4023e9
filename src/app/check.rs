//! Checks of files for commands that do not serve. They also work without the gateway's
//! certificates, such as on a laptop or a CI runner.

use std::io::ErrorKind;

use crate::config::{Binding, Examined, Identity, Source};
use crate::datapath::accept;
use crate::labels::join_first;
use crate::yaml::{Finding, Severity};

use super::inputs::{Report, control_planes, load_and_check};

/// Maximum number of absent files in the warning.
const NAMED_MAX: usize = 8;

/// Checks all files. Missing certificates, keys and tokens are a warning if the machine has no
/// credential of the gateway, and errors otherwise.
pub fn check(source: &Source, examined: Examined) -> Report {
    if has_credential(&examined) {
        finish(load_and_check(source, examined.strict()), true)
    } else {
        check_with_absent_files(source, examined)
    }
}

/// Checks all files for a command that needs no certificates; missing ones are a warning.
pub fn check_without_keys(source: &Source) -> Report {
    check_with_absent_files(source, source.examine_without_keys())
}

/// Adds the bindings on whose addresses this process cannot listen, which are mistakes on the
/// machine of the gateway, and sorts the findings.
fn finish(mut report: Report, is_gateway: bool) -> Report {
    let config = report.inputs.as_ref().map(|inputs| &inputs.config);
    let bindings = config.into_iter().flat_map(|config| &config.bindings);
    let closed = bindings.filter_map(|binding| {
        let severity = match *binding.objects {
            _ if !is_gateway => Severity::Warning,
            [] => Severity::Error,
            _ => Severity::PassedOver,
        };
        Some(Finding { severity, ..unavailable_address(binding)? })
    });
    report.findings.0.extend(closed);
    report.findings.0.sort_by_key(|finding| finding.severity);
    report
}

/// Returns a finding about a binding on whose address this process cannot listen. An address in use
/// may be that of the running gateway.
fn unavailable_address(binding: &Binding) -> Option<Finding> {
    let Binding { listen, service, line, .. } = binding;
    let error = accept::reserve(*listen).err()?;
    let how = match error.kind() {
        ErrorKind::AddrInUse => return None,
        ErrorKind::PermissionDenied => {
            "a port from 1024 on, or add the capability NET_BIND_SERVICE".to_owned()
        }
        _ => format!(
            "an address of this host, or route the network of {} to it by `ip route add local \
             NETWORK dev lo`",
            listen.ip()
        ),
    };
    let what = format!("the binding of {service} cannot listen on {listen}: {error}");
    Some(Finding::warning(&line.0, what, &how))
}

fn check_with_absent_files(source: &Source, mut examined: Examined) -> Report {
    let has_absent = examined.findings.with(Severity::Absent).next().is_some();
    examined.findings.0.retain(|finding| finding.severity != Severity::Absent);
    let absent = has_absent.then(|| warning(&examined)).flatten();
    let mut report = load_and_check(source, examined);
    report.findings.0.splice(0..0, absent.clone());
    finish(Report { absent, ..report }, false)
}

/// Returns true if the machine has a credential of the gateway: its certificate, its key, or a
/// token.
fn has_credential(examined: &Examined) -> bool {
    let own = match &examined.identity {
        Some(Identity::Files(files)) => vec![&files.chain, &files.key],
        _ => Vec::new(),
    };
    let tokens = control_planes(examined).filter_map(|plane| plane.token.as_ref());
    own.into_iter().chain(tokens).any(|file| !examined.is_absent(file))
}

/// Returns one warning about all files that do not exist, at the place that names the first one.
fn warning(examined: &Examined) -> Option<Finding> {
    let (_, place) = examined.absent.first()?;
    let mut named: Vec<_> = examined.absent.iter().map(|(file, _)| file).collect();
    named.sort_unstable();
    named.dedup();
    let named = join_first(named.iter().map(|file| file.display()), NAMED_MAX);
    let what = format!(
        "certificates were not checked: {named} do not exist here; put them there before `strait \
         run`, which refuses to start without them"
    );
    Some(Finding::warning(place, what, ""))
}
